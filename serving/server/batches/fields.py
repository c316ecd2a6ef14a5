"""Fields of Files and Batches, with the names and limits of OpenAI's API. No torch."""

from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

from ....data.checks import is_text
from ..body import Body, FieldType, choice, integer, text
from ..protocol import GENERATIONS

LEAST_FILE_S, MOST_FILE_S = 3600, 30 * 24 * 3600
"""Shortest and longest time for which a client may have a file kept; the longest is the default."""
MAX_LISTED = 100
_MAX_ID = 256
_MOST_METADATA, _MOST_KEY, _MOST_VALUE = 16, 64, 512


def _metadata() -> FieldType:
    def read(given: object) -> object:
        if not isinstance(given, dict) or len(given) > _MOST_METADATA:
            raise ValueError(problem)
        for most, texts in ((_MOST_KEY, given.keys()), (_MOST_VALUE, given.values())):
            if not all(isinstance(text, str) and len(text) <= most and is_text(text) for text in texts):
                raise ValueError(problem)
        return given

    problem = (
        f"metadata must be an object of at most {_MOST_METADATA} names of at most {_MOST_KEY} characters, with "
        f"text of at most {_MOST_VALUE}"
    )
    schema = {
        "type": ["object", "null"],
        "maxProperties": _MOST_METADATA,
        "propertyNames": {"maxLength": _MOST_KEY},
        "additionalProperties": {"type": "string", "maxLength": _MOST_VALUE},
    }
    return Annotated[Any, BeforeValidator(read), WithJsonSchema(schema)], None


BATCH = Body(
    {
        "endpoint": choice(GENERATIONS, default=...),
        "completion_window": choice("24h"),
        "metadata": _metadata(),
        "input_file_id": text("input_file_id", _MAX_ID, default=...),
    }
)
"""Body of `POST /v1/batches`."""
EXPIRY = "expires_after[anchor]", "expires_after[seconds]"
FILE = Body(
    {
        "purpose": choice("batch", default=...),
        EXPIRY[0]: choice("created_at"),
        EXPIRY[1]: integer(LEAST_FILE_S, MOST_FILE_S, MOST_FILE_S),
    }
)
"""Form of `POST /v1/files`, without its file."""
PAGE = Body({"limit": integer(1, MAX_LISTED, MAX_LISTED), "after": text("after", _MAX_ID)})
"""Query of lists."""
