"""The versions that a continued run must share are known in a checkout that is not installed."""

from importlib import metadata

from trainkit.train.resume.surroundings import versions
from trainkit.version import __version__


def test_a_checkout_on_the_path_needs_no_metadata(monkeypatch):
    found = metadata.version

    def version(name):
        if name == "trainkit":
            raise metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(metadata, "version", version)
    assert versions(["deepspeed"])["trainkit"] == __version__
    assert versions(["deepspeed"])["deepspeed"] == found("deepspeed")
