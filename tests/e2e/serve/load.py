"""Run clients of one `tandem serve` that send requests without a pause and compare every answer."""

from __future__ import annotations

import json
import threading
from types import TracebackType

import httpx

from tests.e2e.serve.served import END_S, Served, until

MODEL = "smollm2-135m-instruct"
NUM_CLIENTS = 3
QUESTIONS = (
    "Write a very long story about a ship, a storm and an island.",
    "storm and island, " * 40,
    "Count from one to fifty in words.",
)
NUM_TOKENS = 32


class Load:
    """Run clients within its context. `num_answers` counts the right answers, `problems` lists all others."""

    def __init__(self, served: Served) -> None:
        self.num_answers = 0
        self.problems: list[str] = []
        self._url = f"{served.url}/v1/chat/completions"
        self._expected = [self._answer_to(question) for question in QUESTIONS]
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._client, args=(n,)) for n in range(NUM_CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let every client receive its last answer."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def wait_answers(self, count: int) -> None:
        """Wait for `count` further answers."""
        until_count = self.num_answers + count
        until(lambda: self.num_answers >= until_count or self.problems, END_S, lambda: f"{self.num_answers} answers")

    def _client(self, number: int) -> None:
        index = number
        while not self._is_over.is_set():
            index = (index + 1) % len(QUESTIONS)
            try:
                problem = None if self._answer_to(QUESTIONS[index]) == self._expected[index] else "another answer"
            except Exception as error:
                problem = repr(error)
            with self._lock:
                self.num_answers += problem is None
                self.problems += [] if problem is None else [f"{QUESTIONS[index][:20]}: {problem}"]

    def _answer_to(self, question: str) -> str:
        """Return the streamed answer. Raises the error that keeps it from being complete."""
        messages = [{"role": "user", "content": question}]
        body = {"model": MODEL, "temperature": 0, "max_tokens": NUM_TOKENS, "messages": messages, "stream": True}
        parts: list[str] = []
        with httpx.stream("POST", self._url, json=body, timeout=END_S) as response:
            assert response.status_code == 200, response.read().decode()
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return "".join(parts)
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    parts += [choice["delta"].get("content") or "" for choice in event["choices"]]
        raise AssertionError("the stream ended without [DONE]")
