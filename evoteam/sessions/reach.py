"""What of a session's call is sent on to its model: nothing that the model's server would fetch, run or bill otherwise.

The walls keep a session from the network. A call could go round them through the server: by an address to fetch, a tool
that runs there, a stored file or an earlier answer. Fields that change the price would make the ledger wrong.
"""

import json
from typing import Any

from evoteam.budget import CHARS_PER_TOKEN

HOLDERS = ("image", "document", "input_image", "input_file", "container_upload", "item_reference")
INLINE = ("base64", "text", "content")  # kinds of a source that hold the data themselves
PICTURE_TOKENS = 5_000  # above what a picture of any size is counted as
LEFT_OUT = "[left out: a session reaches nothing by address or by number]"


def kept(body: dict, api: dict) -> dict:
    """The fields of `body` that the row `api` of agents.json allows, cleaned; tools that the server runs left out."""
    body = {name: _clean(value, api["text_type"]) for name, value in body.items() if name in api["fields"]}
    if isinstance(body.get("tools"), list):
        given = [tool for tool in body["tools"] if isinstance(tool, dict)]
        body["tools"] = [tool for tool in given if tool.get("type", api["tool_types"][0]) in api["tool_types"]]
    return body


def prompt_characters(body: dict) -> float:
    """Characters of a call, as tokens are estimated from them; a picture counts as a text of PICTURE_TOKENS."""
    pictures = 0

    def without(value: Any) -> Any:
        nonlocal pictures
        if isinstance(value, list):
            return [without(item) for item in value]
        if not isinstance(value, dict):
            return value
        if value.get("type") in ("image", "input_image"):
            pictures += 1
            return None
        return {name: without(item) for name, item in value.items()}

    return len(json.dumps(without(body))) + pictures * PICTURE_TOKENS * CHARS_PER_TOKEN


def _clean(value: Any, text_type: str) -> Any:
    if isinstance(value, list):
        return [_clean(item, text_type) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") in HOLDERS and not _holds_its_data(value):
        return {"type": text_type, "text": LEFT_OUT}
    if isinstance(cache := value.get("cache_control"), dict):
        value = value | {"cache_control": {name: given for name, given in cache.items() if name != "ttl"}}
    return {name: _clean(item, text_type) for name, item in value.items()}


def _holds_its_data(block: dict) -> bool:
    source = block.get("source")
    if isinstance(source, dict):
        return source.get("type") in INLINE and not {"url", "file_id"} & source.keys()
    data = block.get("image_url") or block.get("file_data")
    return isinstance(data, str) and data.startswith("data:") and not {"file_url", "file_id"} & block.keys()
