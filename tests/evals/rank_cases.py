"""An evaluation whose questions two ranks share."""

from pathlib import Path


def evaluate(model, data, tasks, output):
    from trainkit.cli.app import main

    arguments = ["eval", model, "--tasks", tasks, "--data", data]
    arguments += ["--output", output, "--max-new-tokens", "6", "--device", "cpu"]
    return [main(arguments), Path(output).exists()]
