"""Run dispatchers with kernels="triton" in triton's interpreter, in a process of its own.

The interpreter must be selected before triton is imported, and diffusers imports triton. So the tests start this script
with TRITON_INTERPRET=1, which does not affect other tests. It reads pickled calls (module, name, args, kwargs) from
standard input and writes the pickled result or error to standard output. Tensors keep their strides.
"""

import importlib
import pickle
import sys


def main() -> None:
    replies = sys.stdout.buffer
    sys.stdout = sys.stderr  # output of a kernel must not mix with the replies
    while True:
        try:
            module, name, args, kwargs = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            function = getattr(importlib.import_module(module), name)
            reply = function(*args, kernels="triton", **kwargs)
        except Exception as error:  # noqa: BLE001 - the test that called raises it again
            reply = error
        pickle.dump(reply, replies)
        replies.flush()


if __name__ == "__main__":
    main()
