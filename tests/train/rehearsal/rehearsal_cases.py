"""One start of a rehearsed run in a forked process, in place of a new interpreter."""

import os
import sys


def start(cwd, words, environment, forgets=False):
    """``forgets``: the random numbers of the checkpoint are not taken up."""
    os.chdir(cwd)
    if os.environ["WORLD_SIZE"] == "1":
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    os.environ.update(environment)
    import trainkit.run.report
    import trainkit.train.build
    import trainkit.train.loop
    from trainkit.cli.killed import main

    trainkit.run.report.draw_plots = trainkit.run.report.svg_plots = lambda *_: []
    if forgets:
        trainkit.train.loop.load_random_state = lambda *_: None
    sys.argv = ["trainkit", *words]
    return main()
