"""Ask the gateways of a release for a completion over gRPC, and fail unless its stream ends well; `helm test` runs it.

GRPC is where they are. TLS says that they have a certificate, and CA_FILE is its CA. Without TANDEM_API_KEY a gateway
that asks for one is to say so; with TLS=mutual it asks for a client certificate, which this test does not have.
"""

import os
from pathlib import Path

import grpc

from tandem.wire.gen import inference_pb2 as pb
from tandem.wire.gen.inference_pb2_grpc import InferenceStub

TARGET, KEY = os.environ["GRPC"], os.environ.get("TANDEM_API_KEY", "")
METADATA = [("authorization", f"Bearer {KEY}")] if KEY else []
TLS, CA_FILE = os.environ.get("TLS", ""), os.environ.get("CA_FILE", "")


def open_channel() -> grpc.Channel:
    if not TLS:
        return grpc.insecure_channel(TARGET)
    return grpc.secure_channel(TARGET, grpc.ssl_channel_credentials(Path(CA_FILE).read_bytes() if CA_FILE else None))


def main() -> None:
    with open_channel() as channel:
        stub = InferenceStub(channel)
        try:
            models = stub.ListModels(pb.ListModelsRequest(), metadata=METADATA, timeout=60)
        except grpc.RpcError as error:
            refusals = [grpc.StatusCode.UNAUTHENTICATED] if not KEY else []
            refusals += [grpc.StatusCode.UNAVAILABLE] if TLS == "mutual" else []
            if error.code() not in refusals:
                raise
            print("refused, as whoever lacks the key or the certificate that the gateway asks for should be:", error)
            return
        if TLS == "mutual":
            raise SystemExit("a client without a certificate was served, although gateway.tls.clientCaSecret is set")
        message = pb.ChatMessage(role="user", content="Say hello.")
        request = pb.ChatRequest(model=models.data[0].id, messages=[message], max_completion_tokens=16, temperature=0)
        # Tokens that a gateway has at once share a message, so a short stream may have only one.
        replies = list(stub.StreamChat(request, metadata=METADATA, timeout=120))
        print(*replies, sep="\n")
        assert replies, "the stream is empty"
        last = replies[-1]
        assert last.choices[0].finish_reason and last.usage.completion_tokens > 0, "the stream has no end"


if __name__ == "__main__":
    main()
