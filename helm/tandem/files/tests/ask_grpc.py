"""Asks the gateways of a release over gRPC, as `helm test` does; never looks at anything but the answer.

GRPC is where they are. Without TANDEM_API_KEY a gateway that asks for one is to say so.
"""

import os

import grpc

from tandem.wire.gen import inference_pb2 as pb
from tandem.wire.gen.inference_pb2_grpc import InferenceStub

TARGET, KEY = os.environ["GRPC"], os.environ.get("TANDEM_API_KEY", "")
METADATA = [("authorization", f"Bearer {KEY}")] if KEY else []


def main() -> None:
    with grpc.insecure_channel(TARGET) as channel:
        stub = InferenceStub(channel)
        try:
            models = stub.ListModels(pb.ListModelsRequest(), metadata=METADATA, timeout=60)
        except grpc.RpcError as error:
            if KEY or error.code() != grpc.StatusCode.UNAUTHENTICATED:
                raise
            print("a key is asked for, and this test was given none: whoever has none is refused, as it should be")
            return
        message = pb.ChatMessage(role="user", content="Say hello.")
        request = pb.ChatRequest(model=models.data[0].id, messages=[message], max_completion_tokens=16, temperature=0)
        num_replies = 0
        for reply in stub.StreamChat(request, metadata=METADATA, timeout=120):
            num_replies += 1
            print(reply)
        assert num_replies > 1, "no stream came"


if __name__ == "__main__":
    main()
