"""Implement `tandem chat`: hold a conversation in the terminal with a running gateway, over its HTTP API."""

from __future__ import annotations

import argparse
import json
import os
import ssl
import sys
from collections.abc import Iterable, Iterator

import httpx

from tandem.core.addresses import format_host
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.settings import Resolved

KEY_VARIABLE = "TANDEM_API_KEY"
_HELP = "Type a message and press Enter. /new starts over, Ctrl-C stops an answer, /quit or Ctrl-D ends the chat."


def run(resolved: Resolved, args: argparse.Namespace) -> int:
    gateway = resolved.config.gateway
    url = (args.url or f"{gateway.scheme}://{format_host(gateway.host)}:{gateway.port}").rstrip("/")
    # Read from the environment, because other users can list the command lines of processes.
    key = os.environ.get(KEY_VARIABLE)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    timeout = httpx.Timeout(10.0, read=None)
    verify = _tls_context(args)
    try:
        client = httpx.Client(base_url=url, headers=headers, timeout=timeout, verify=verify)
    except httpx.InvalidURL as error:
        raise TandemError(ErrorKind.INVALID_REQUEST, f"--url {url} is not a URL: {error}", param="url") from error
    with client:
        model = _first_model(client)
        print(f"{model} at {url}\n{_HELP}")  # noqa: T201 - a conversation
        messages: list[dict[str, str]] = []
        while True:
            text = _read_line()
            if text is None or text == "/quit":
                return 0
            if text == "/new":
                messages.clear()
            elif text:
                messages.append({"role": "user", "content": text})
                _answer(client, model, messages, args)


def _tls_context(args: argparse.Namespace) -> ssl.SSLContext:
    """Return the context for an https:// gateway. Raises TandemError(INVALID_REQUEST) for files that cannot be used."""
    try:
        context = ssl.create_default_context(cafile=args.ca_file) if args.ca_file else httpx.create_ssl_context()
        if args.cert_file:
            context.load_cert_chain(args.cert_file, args.key_file)
    except OSError as error:
        message = f"cannot use --ca-file, --cert-file or --key-file: {error}"
        raise TandemError(ErrorKind.INVALID_REQUEST, message) from error
    return context


def _first_model(client: httpx.Client) -> str:
    try:
        response = client.get("/v1/models")
    except httpx.HTTPError as error:
        message = f"no gateway answers at {client.base_url}: {error}; start `tandem serve`, or set --url"
        raise TandemError(ErrorKind.NO_WORKER, message) from error
    if response.status_code == 401:
        message = f"{client.base_url} requires an API key: set {KEY_VARIABLE} to a valid one"
        raise TandemError(ErrorKind.UNAUTHENTICATED, message)
    if response.status_code != 200:
        message = f"{client.base_url} answered {response.status_code}: {_error_message(response.text)}"
        raise TandemError(ErrorKind.NO_WORKER, message)
    try:
        names = [str(model["id"]) for model in response.json()["data"]]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        message = f"{response.url} returns no list of models: set --url to the address of a gateway"
        raise TandemError(ErrorKind.NO_WORKER, message) from error
    if not names:
        message = f"{client.base_url} serves no model yet: GET /ready says what is missing"
        raise TandemError(ErrorKind.NO_WORKER, message)
    return names[0]


def _read_line() -> str | None:
    """Return one line of input without surrounding blanks, None at the end of the input."""
    try:
        return input("\n> ").strip()
    except (EOFError, KeyboardInterrupt):
        return None


def _answer(client: httpx.Client, model: str, messages: list[dict[str, str]], args: argparse.Namespace) -> None:
    """Stream one answer and append it to the messages; if there is no answer, remove the question instead."""
    body = {"model": model, "messages": messages, "stream": True, "max_tokens": args.max_tokens}
    if args.temperature is not None:
        body["temperature"] = args.temperature
    parts: list[str] = []
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise TandemError(ErrorKind.INTERNAL, _error_message(response.text))
            for part in deltas(response.iter_lines()):
                parts.append(part)
                print(part, end="", flush=True)  # noqa: T201
            print(f"\n[path: {response.headers.get('x-tandem-path', '?')}]")  # noqa: T201
    except KeyboardInterrupt:
        print(" [stopped]")  # noqa: T201
    except (TandemError, httpx.HTTPError) as error:
        print(f"\n[failed: {error}]", file=sys.stderr)  # noqa: T201
    if parts:
        messages.append({"role": "assistant", "content": "".join(parts)})
    else:
        messages.pop()


def deltas(lines: Iterable[str]) -> Iterator[str]:
    """Yield the text of each event of a streamed chat answer. `lines`: lines of the event stream.

    Raises TandemError for an error event in the stream, and for an event that is not part of a chat answer."""
    for line in lines:
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        try:
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise TandemError(ErrorKind.INTERNAL, str(event["error"]["message"]))
            texts = [str(choice["delta"].get("content") or "") for choice in event["choices"]]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise TandemError(ErrorKind.INVALID_REQUEST, f"not an event of a chat ({error!r}): {line:.200}") from None
        yield from texts


def _error_message(body: str) -> str:
    """Return the message in an error body; the whole body if it is not the gateway's (a proxy may have written it)."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body
