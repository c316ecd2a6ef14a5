"""The worker processes of a cascade, under the same dispatcher as in the simulator. No torch here."""

from collections.abc import Callable
from dataclasses import replace

from ...data.run_facts import usable_cores
from ..fleet.processes import ProcessFleet, ProcessWorker
from .controller import SAMPLE_S
from .dispatcher import Dispatcher
from .worker import WorkerSettings

_ENTRY = f"{__package__}.worker:run_worker"


def cascade_fleet(
    template: WorkerSettings,
    num_workers: int,
    dispatcher: Dispatcher,
    *,
    on_note: Callable[[str], None] = lambda text: None,
    on_steps: Callable[[int, int], None] = lambda request_id, steps_done: None,
) -> ProcessFleet:
    """Return the fleet of a cascade. Each worker has its own GPU, or its own core if there are enough cores.

    `template` has the other settings of the workers.
    """
    is_cuda = template.device.startswith("cuda")

    def launch(index: int) -> ProcessWorker:
        settings = replace(
            template,
            device=f"cuda:{index}" if is_cuda else template.device,
            core=None if is_cuda or num_workers > usable_cores() else index,
        )
        return ProcessWorker(index, _ENTRY, settings, dispatcher.slots[index].leg, device=settings.device)

    return ProcessFleet(launch, dispatcher, num_workers, tick_s=SAMPLE_S, on_note=on_note, on_steps=on_steps)
