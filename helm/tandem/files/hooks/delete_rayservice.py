"""Delete the RayService of a release, and wait until KubeRay has removed its clusters.

`helm uninstall` runs this before it deletes the release's Redis, from which KubeRay removes Ray's state while a cluster
ends. RAYSERVICE and POD_NAMESPACE name the object. The exit status is 1 if clusters are left after TIMEOUT_S seconds.
"""

import os
import sys
import time

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

NAME, NAMESPACE = os.environ["RAYSERVICE"], os.environ["POD_NAMESPACE"]
TIMEOUT_S = float(os.environ["TIMEOUT_S"])
OBJECTS = ("ray.io", "v1", NAMESPACE)


def clusters_of(api: client.CustomObjectsApi, service_uid: str) -> list[str]:
    items = api.list_namespaced_custom_object(*OBJECTS, "rayclusters")["items"]
    metadata = [item["metadata"] for item in items]
    return [m["name"] for m in metadata if any(o["uid"] == service_uid for o in m.get("ownerReferences", ()))]


def main() -> int:
    config.load_incluster_config()
    api = client.CustomObjectsApi()
    try:
        uid = api.get_namespaced_custom_object(*OBJECTS, "rayservices", NAME)["metadata"]["uid"]
        api.delete_namespaced_custom_object(*OBJECTS, "rayservices", NAME)
    except ApiException as error:
        if error.status == 404:
            print(f"there is no RayService {NAME}")
            return 0
        raise
    deadline = time.monotonic() + TIMEOUT_S
    while left := clusters_of(api, uid):
        if time.monotonic() > deadline:
            reason = f"RayCluster {', '.join(left)} is left {TIMEOUT_S:.0f} s after RayService {NAME} was deleted"
            print(
                f"{reason}: look at the log of KubeRay's operator. `helm uninstall --no-hooks` does not wait.",
                file=sys.stderr,
            )
            return 1
        time.sleep(1)
    print(f"RayService {NAME} and its clusters are gone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
