import time

from trainkit.run.report import CurveRefresher


def test_a_drawing_is_rare_and_never_doubled(trained_run):
    refresher = CurveRefresher(trained_run, interval_seconds=3600)
    assert not refresher.refresh()
    refresher = CurveRefresher(trained_run, interval_seconds=0)
    assert refresher.refresh()
    assert not refresher.refresh()
    deadline = time.monotonic() + 120
    while not (trained_run.plots / "overview.png").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert (trained_run.plots / "loss.png").exists()
    assert "<meta http-equiv" in trained_run.report.read_text()
    assert "state running'>running<" in trained_run.report.read_text()
    refresher.close()
    refresher.close()
    assert [path.name for path in trained_run.plots.iterdir() if path.name[0] == "."] == []


def test_a_stopped_drawing_leaves_no_half_file(trained_run):
    refresher = CurveRefresher(trained_run, interval_seconds=0)
    refresher.refresh()
    time.sleep(0.3)
    refresher.close()
    assert all(
        path.suffix == ".png" and path.name[0] != "." for path in trained_run.plots.iterdir()
    )
