"""Flags and environment, and that the settings demand the guard wherever they are unpickled."""

import argparse
import copy
import pickle

import pytest

from sglang_pd_guard import seal
from sglang_pd_guard.settings import GUARDS, Settings, SettingsError, add_flags


def parse(*argv: str, env: dict | None = None) -> Settings | None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return Settings.from_namespace(parser.parse_args(argv), env or {})


def test_nothing_asked_for_is_nothing():
    assert parse() is None
    assert Settings.from_env({}) is None
    assert Settings.from_env({"SGLANG_PD_GUARD": "0", "SGLANG_PD_GUARD_MODE": "observe"}) is None


def test_defaults_are_the_strict_ones():
    assert parse("--enable-pd-guard") == Settings(mode="enforce", peer="require", disable=frozenset(), allow_unverified=False)


def test_every_flag():
    got = parse(
        "--enable-pd-guard", "--pd-guard-mode", "observe", "--pd-guard-peer", "prefer",
        "--pd-guard-disable", " admission ,", "--pd-guard-allow-unverified", "--pd-guard-allow-capacity-mismatch",
        "--pd-guard-max-quarantined", "0.5", "--pd-guard-max-batch-mib", "8",
        "--pd-guard-checksum",
    )  # fmt: skip
    assert got == Settings("observe", "prefer", frozenset({"admission"}), True, True, 0.5, 8, True)


def test_environment_round_trip():
    settings = Settings("observe", "prefer", frozenset(GUARDS), True, True, 0.1, 0, True)
    assert Settings.from_env(settings.to_env()) == settings
    assert Settings.from_env(Settings().to_env()) == Settings()


def test_a_flag_wins_over_the_environment():
    env = Settings("observe", "prefer").to_env()
    assert parse("--pd-guard-mode", "enforce", env=env) == Settings("enforce", "prefer")


def test_the_environment_counts_beside_the_flag():
    env = {"SGLANG_PD_GUARD_PEER": "prefer", "SGLANG_PD_GUARD_CHECKSUM": "1"}
    assert parse("--enable-pd-guard", env=env) == Settings(peer="prefer", checksum=True)
    assert parse("--enable-pd-guard", env=env | {"SGLANG_PD_GUARD": "0"}) == Settings(peer="prefer", checksum=True)
    assert parse("--enable-pd-guard", "--pd-guard-peer", "require", env=env) == Settings(checksum=True)
    assert parse(env=env) is None
    with pytest.raises(SettingsError, match="mode must be one of"):
        parse("--enable-pd-guard", env={"SGLANG_PD_GUARD_MODE": "bogus"})


def test_a_guard_flag_alone_is_refused():
    with pytest.raises(SettingsError, match="--pd-guard-mode without --enable-pd-guard"):
        parse("--pd-guard-mode", "observe")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Settings(mode="maybe"), "mode must be one of enforce, observe"),
        (lambda: Settings(peer="never"), "peer must be one of require, prefer"),
        (lambda: Settings(disable=frozenset({"admision"})), "unknown guard admision; the guards are: admission, receipt, room, release, ownership, capacity, audit"),
        (lambda: Settings(max_batch_mib=-1), "max-batch-mib must be 0 or more, not -1"),
        (lambda: Settings(max_quarantined=1.5), "max-quarantined must be a share between 0 and 1, not 1.5"),
        (
            lambda: Settings.from_env({"SGLANG_PD_GUARD": "1", "SGLANG_PD_GUARD_MAX_QUARANTINED": "half"}),
            "SGLANG_PD_GUARD_MAX_QUARANTINED must be a number, not 'half'",
        ),
        (lambda: Settings.from_env({"SGLANG_PD_GUARD": "perhaps"}), "SGLANG_PD_GUARD must be 1 or 0"),
    ],
)
def test_a_value_that_makes_no_sense_is_named(make, words):
    with pytest.raises(SettingsError, match=words):
        make()


def test_unpickling_demands_the_guard(monkeypatch):
    monkeypatch.setattr(seal, "_demanded", None)
    settings = Settings("observe", "prefer", frozenset({"admission"}), True)
    data = pickle.dumps(settings)
    assert seal.demanded() is None
    assert pickle.loads(data) == settings
    assert seal.demanded() == settings


def test_copying_does_not():
    settings = Settings()
    assert copy.deepcopy(settings) is settings
    assert copy.copy(settings) is settings
