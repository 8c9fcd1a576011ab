"""List the routes of OpenAI's API and of similar servers that are not supported, for helpful 404 messages."""

from __future__ import annotations

_UNSERVED = {
    "/v1/embeddings": "embeddings",
    "/v1/responses": "the Responses API",
    "/v1/conversations": "the Responses API",
    "/v1/batches": "the Batch API (the lane `batch` of a completion is for work that can wait)",
    "/v1/files": "files",
    "/v1/uploads": "files",
    "/v1/vector_stores": "vector stores",
    "/v1/fine_tuning": "fine-tuning",
    "/v1/audio": "audio",
    "/v1/realtime": "realtime sessions",
    "/v1/images": "images",
    "/v1/videos": "videos",
    "/v1/moderations": "moderations",
    "/v1/assistants": "assistants",
    "/v1/threads": "assistants",
    "/v1/evals": "evaluations",
    "/v1/containers": "containers",
    "/v1/messages": "Anthropic's Messages API",
    "/v1/load_lora_adapter": "LoRA adapters",
    "/v1/unload_lora_adapter": "LoRA adapters",
    "/v1/rerank": "reranking",
    "/rerank": "reranking",
    "/v1/score": "scoring of pairs",
    "/score": "scoring of pairs",
    "/pooling": "pooling",
    "/classify": "classification",
}


def unsupported_feature(path: str) -> str | None:
    """Return a sentence saying that the feature behind a path is not served; None for an unknown path."""
    for prefix, feature in _UNSERVED.items():
        if path == prefix or path.startswith(prefix + "/"):
            return f"Tandem does not serve {feature}"
    return None
