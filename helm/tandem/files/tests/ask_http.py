"""Ask the gateways of a release for a completion over HTTP, and fail unless the answer has tokens; `helm test` runs it.

HTTP is where they are, CA_FILE the CA of their certificate. Without TANDEM_API_KEY a gateway that asks for one is to
say so; with TLS=mutual it asks for a client certificate, which this test does not have.
"""

import json
import os
import ssl
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

URL, KEY = os.environ["HTTP"], os.environ.get("TANDEM_API_KEY", "")
HAS_ALL = bool(KEY) and os.environ.get("TLS") != "mutual"
CONTEXT = ssl.create_default_context(cafile=os.environ.get("CA_FILE") or None)
HEADERS = {"content-type": "application/json", **({"authorization": f"Bearer {KEY}"} if KEY else {})}


def send(path: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(URL + path, data=data, headers=HEADERS), timeout=120, context=CONTEXT) as response:
        print(path, response.status, response.headers.get("x-tandem-path", ""))
        return json.load(response)


def main() -> None:
    send("/ready")
    try:
        model = send("/v1/models")["data"][0]["id"]
    except HTTPError as error:
        if HAS_ALL or error.code != 401:
            raise
        print("refused, as whoever lacks the key or the certificate that the gateway asks for should be:", error.read())
        return
    if os.environ.get("TLS") == "mutual":
        raise SystemExit("a client without a certificate was served, although gateway.tls.clientCaSecret is set")
    messages = [{"role": "user", "content": "Say hello."}]
    answer = send("/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": 16, "temperature": 0})
    print(json.dumps(answer["choices"][0]))
    assert answer["usage"]["completion_tokens"] > 0, answer


if __name__ == "__main__":
    main()
