"""llama.cpp's server in a process of its own.

``python -m trainkit.export.gguf.server FILE CONTEXT``.
It prints its address and serves until its standard input is closed, so it never outlives the
process that started it. An assertion of llama.cpp ends this process and not the export.
"""

import json
import os
import sys


def main() -> None:
    """Serve one GGUF on a free port of this machine."""
    import xllamacpp

    path, context = sys.argv[1], int(sys.argv[2])
    parameters = xllamacpp.CommonParams()
    parameters.model.path = path
    parameters.n_ctx = context
    parameters.n_parallel = 1
    parameters.n_gpu_layers = 0  # what is compared is the file, not a device
    parameters.warmup = False
    parameters.fit_params = False
    parameters.ui = False
    parameters.cpuparams.n_threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    parameters.api_keys = [os.environ["TRAINKIT_EXPORT_KEY"]]
    server = xllamacpp.Server(parameters)
    sys.stdout.write(json.dumps({"address": server.listening_address}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
