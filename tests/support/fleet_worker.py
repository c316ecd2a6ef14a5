"""Entry points of worker processes without a model, for tests of fleets."""

import os
import threading
from multiprocessing.connection import Connection

from patchedserve.serving.core.request_state import RequestRecord
from patchedserve.serving.fleet.messages import Alive, Draw, Ended, Loaded, Stepped, Stop
from patchedserve.serving.fleet.worker import WorkerEnd

EXIT_CODE = 3


def run(connection: Connection) -> None:
    """End requests immediately, as completed; or die of one with the prompt "die"."""
    end = WorkerEnd(connection)
    end.send(Loaded())
    threading.Thread(target=end.send_heartbeats, args=(lambda: Alive(0),), daemon=True).start()
    while not isinstance(command := end.receive(), Stop):
        if not isinstance(command, Draw):
            continue
        if command.request.prompt == "die":
            os._exit(EXIT_CODE)
        record = RequestRecord.of(command.request)
        record.close("completed", command.request.arrival_s)
        end.send(Stepped(record.request_id, record.num_inference_steps))
        end.send(Ended(record))


def run_without_files(connection: Connection) -> None:
    """Report that the models cannot be loaded."""
    WorkerEnd(connection).send(Loaded("no such file"))
