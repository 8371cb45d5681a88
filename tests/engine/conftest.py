"""Real SGLang clusters for the tests in this folder.

A test asks for the fixture ``clusters`` and calls it: ``cluster = clusters(version, guard=True, ...)`` with the options
of ``pd_rig.cluster.Cluster``. One cluster runs at a time. It is kept for the next test that asks for the same, so a
test leaves it idle, or says ``fresh=True`` to get one that no other test has used or will use.

Tests of one version with the mark ``cluster("guarded")`` or ``cluster("unguarded")`` ask for ``clusters(version, guard=True)`` or
``clusters(version)`` and nothing more; they run one after the other, so that they share it.

A test that asks for the fixture ``version`` and names none runs on the versions of ``CORE``, with the mark ``each`` on those of ``EACH``,
with ``every`` on every version that the rig has, as all of them do with ``--full``. The mark ``versions`` narrows that to a range. Tests with the mark
``full`` run with ``--full`` only.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "rig"))

from pd_rig.home import VERSIONS, RigError, versions, why_missing

_HERE = Path(__file__).parent

#: The oldest that is supported and the newest.
CORE = ("0.5.12.post1", "0.5.23")
#: Those between which SGLang changed what the guard stops.
EACH = ("0.5.12.post1", "0.5.19", "0.5.23")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run each engine test on every SGLang version of the rig, and all variants")


class ClusterPool:
    """At most one running cluster, reused as long as the same one is asked for."""

    def __init__(self, new_log_dir):
        self._new_log_dir = new_log_dir
        self._key = None
        self.current = None

    def __call__(self, version: str, *, fresh: bool = False, **options):
        if reason := why_missing(version):
            pytest.skip(reason)
        key = (version, repr(sorted(options.items())))
        if fresh or key != self._key or not self._usable():
            self.close()
            self._start(version, options)
        self._key = None if fresh else key
        return self.current

    def _start(self, version: str, options: dict) -> None:
        from pd_rig.cluster import Cluster

        options.setdefault("log_dir", self._new_log_dir(f"rig-{version}"))
        self.current = Cluster(version, **options).start()

    def _usable(self) -> bool:
        """Whether the last test left the cluster as it should; if not, the next one must not suffer for it."""
        try:
            self.current.check_alive()
            self.current.wait_idle()
        except Exception:
            return False
        return True

    def close(self) -> None:
        if self.current is not None:
            self.current.stop()
        self.current = self._key = None


@pytest.fixture(scope="session")
def _cluster_pool(request, tmp_path_factory):
    pool = request.config.stash[_POOL] = ClusterPool(tmp_path_factory.mktemp)
    yield pool
    pool.close()


@pytest.fixture
def clusters(_cluster_pool):
    return _cluster_pool


def pytest_generate_tests(metafunc):
    named = any("version" in str(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize"))
    if "version" in metafunc.fixturenames and not named:
        marks = {mark.name for mark in metafunc.definition.iter_markers()}
        some = VERSIONS if "every" in marks else EACH if "each" in marks else CORE
        span = metafunc.definition.get_closest_marker("versions")
        first, last = map(VERSIONS.index, span.args if span else (VERSIONS[0], VERSIONS[-1]))
        params = [v for v in versions() if (metafunc.config.getoption("full") or v in some) and first <= VERSIONS.index(v) <= last]
        metafunc.parametrize("version", params, indirect=True, scope="session")


@pytest.fixture(scope="session")
def version(request):
    """One SGLang version of several; skips one that is not in the rig environment."""
    if reason := why_missing(request.param):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def rig_version():
    """The newest version that can run here, for tests that need only one."""
    for version in reversed(VERSIONS):
        if why_missing(version) is None:
            return version
    pytest.skip(why_missing(VERSIONS[-1]))


_POOL: pytest.StashKey[ClusterPool] = pytest.StashKey()


def pytest_collection_modifyitems(config, items):
    """Leave out what only ``--full`` runs, and group this folder's tests by SGLang version and by the mark ``cluster``, so that a
    cluster starts once, not once a module.
    """
    if not config.getoption("full"):
        out = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if item not in out]
        config.hook.pytest_deselected(items=out)

    def place(item) -> tuple[int, int]:
        version = item.callspec.params.get("version") if hasattr(item, "callspec") else None
        mark = item.get_closest_marker("cluster")
        kind = ("guarded", None, "unguarded").index(mark.args[0] if mark else None)
        return VERSIONS.index(version) if version in VERSIONS else len(VERSIONS), kind

    ours = [i for i, item in enumerate(items) if _HERE in item.path.parents]
    for i, item in zip(ours, sorted((items[i] for i in ours), key=place), strict=True):
        items[i] = item
        if item.config.pluginmanager.hasplugin("timeout") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))


def pytest_runtest_teardown(item, nextitem):
    """Keep the cluster no longer than the tests that may use it: the next test may start one of its own."""
    pool = item.config.stash.get(_POOL, None)
    if pool is not None and "clusters" not in getattr(nextitem, "fixturenames", ()):
        pool.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Show the end of each server's log below a failure, unless the failure quotes it already."""
    report = yield
    pool = item.config.stash.get(_POOL, None)
    if (
        report.failed
        and pool is not None
        and pool.current is not None
        and not call.excinfo.errisinstance(RigError)
    ):
        for server in pool.current.servers:
            report.sections.append((f"log of {server.name} ({server.log})", server.log_tail()))
    return report
