"""On PYTHONPATH only where a test wants another SGLang than the installed one: see pd_rig.drift."""

from pd_rig.drift import install

install()
