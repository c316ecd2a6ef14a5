"""Tables of a cascade: the work of each model for each request, the plans, and the confidences of a bank of images."""

import pyarrow as pa

from .schemas import TableSchema, column

_I, _F, _S, _B = pa.int64(), pa.float64(), pa.string(), pa.bool_()

LEGS = TableSchema(
    "legs",
    1,
    (
        column("request_id", _I),
        column("leg", _S, meaning="light or heavy"),
        column("model", _S, meaning="as the user names it"),
        column("worker", _I),
        column("start_s", _F, "s", meaning="when the request came to the worker, from the start of the trace"),
        column("end_s", _F, "s", meaning="when it left"),
        column("status", _S, meaning="completed, failed, discarded or cancelled"),
        column("confidence", _F, "", True, "of a light image; empty where nobody looked or it was no number"),
        column("threshold", _F, "", True, "of the plan that it was compared with"),
        column("is_deferred", _B, meaning="whether the request went on to the heavy model"),
    ),
)
"""One row per request and model that worked on it, in the order in which they ended."""

PLANS = TableSchema(
    "plans",
    1,
    (
        column("start_s", _F, "s", meaning="from when on it held"),
        column("demand", _F, "1/s", meaning="requests a second that it was made for"),
        column("light_queue", _F, meaning="requests that wait for a worker of the light model, on average"),
        column("heavy_queue", _F, meaning="requests that wait for a worker of the heavy model, on average"),
        column("light_workers", _I),
        column("heavy_workers", _I),
        column("light_batch", _I, meaning="largest batch"),
        column("heavy_batch", _I, meaning="largest batch; 0 where nothing is deferred"),
        column("threshold", _F, "", True, "a light image of this confidence or more is the answer"),
        column("share", _F, meaning="of requests that are expected to be deferred, or heavy from the start"),
        column("status", _S, meaning="optimal, without-queues, light-only or overloaded"),
        column("solve_s", _F, "s", meaning="what making it took"),
    ),
)
"""One row per plan."""

DEFERRAL = TableSchema(
    "deferral",
    1,
    (
        column("place", _I, meaning="row of the image in the bank's features"),
        column("prompt", _S),
        column("width", _I, "px"),
        column("height", _I, "px"),
        column("seed", _I),
        column("confidence", _F, "", True, "of the light image; empty where it was no number"),
    ),
)
"""One row per prompt of a bank: f(t) is the share of confidences below t. The head describes the images' origin."""
