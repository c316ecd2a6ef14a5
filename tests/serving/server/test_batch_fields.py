"""Fields of Files and Batches: values that are refused, and the schema that follows from the same fields."""

from typing import Any

import pytest

from patchedserve.serving.server.batches.fields import BATCH, EXPIRY, FILE, PAGE
from patchedserve.serving.server.body import Body
from patchedserve.serving.server.errors import ApiError
from patchedserve.serving.server.openapi import body_of, form_of, query_of

ASKED = {"input_file_id": "file-1", "endpoint": "/v1/images/generations"}
METADATA = "metadata must be an object of at most 16 names of at most 64 characters, with text of at most 512"


def test_defaults() -> None:
    assert BATCH.read(ASKED | {"metadata": None}).model_dump() == ASKED | {
        "completion_window": "24h",
        "metadata": None,
    }
    assert FILE.read_texts({"purpose": "batch", "more": "x"}).model_dump() == {
        "purpose": "batch",
        EXPIRY[0]: "created_at",
        EXPIRY[1]: 30 * 24 * 3600,
    }
    assert PAGE.read_texts({"limit": "5", "order": "asc"}).model_dump() == {"limit": 5, "after": None}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint", "endpoint is '/v1/embeddings', but it must be /v1/images/gener"),
        ({"endpoint": None}, "endpoint", "endpoint is missing"),
        ({"input_file_id": None}, "input_file_id", "input_file_id is missing"),
        ({"input_file_id": 3}, "input_file_id", "input_file_id is 3, but it must be a string"),
        ({"completion_window": "1h"}, "completion_window", "completion_window is '1h', but it must be 24h"),
        ({"metadata": {"a": 1}}, "metadata", METADATA),
        ({"metadata": {"a" * 65: ""}}, "metadata", METADATA),
        ({"metadata": {"a": "\ud800"}}, "metadata", METADATA),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata", METADATA),
        ({"metadata": []}, "metadata", METADATA),
        ({"window": "24h"}, "window", "the field 'window' is unknown"),
    ],
)
def test_invalid_batch(body: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        BATCH.read(ASKED | body)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize(
    ("kind", "texts", "message"),
    [
        (FILE, {"purpose": "fine-tune"}, "purpose is 'fine-tune', but it must be batch"),
        (FILE, {}, "purpose is missing"),
        (FILE, {"purpose": "batch", EXPIRY[0]: "now"}, f"{EXPIRY[0]} is 'now', but it must be created_at"),
        (FILE, {"purpose": "batch", EXPIRY[1]: "5"}, f"{EXPIRY[1]} is 5, but it must be a whole number from 3600"),
        (PAGE, {"limit": "0"}, "limit is 0, but it must be a whole number from 1 to 100"),
        (PAGE, {"limit": "1.0"}, "limit is 1.0, but it must be a whole number from 1 to 100"),
        (PAGE, {"limit": "٣"}, "limit is '٣', but it must be a whole number from 1 to 100"),
    ],
)
def test_invalid_text(kind: Body, texts: dict[str, str], message: str) -> None:
    with pytest.raises(ApiError) as caught:
        kind.read_texts(texts)
    assert caught.value.message.startswith(message)


def test_schema_follows_from_the_fields() -> None:
    batch = body_of(BATCH)["requestBody"]["content"]["application/json"]["schema"]
    assert (batch["required"], batch["additionalProperties"]) == (["endpoint", "input_file_id"], False)
    assert batch["properties"]["metadata"]["maxProperties"] == 16
    file = form_of(FILE, "file")["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert (file["required"], file["properties"]["file"]["format"]) == (["file", "purpose"], "binary")
    assert {each["name"] for each in query_of(PAGE)["parameters"]} == {"limit", "after"}
