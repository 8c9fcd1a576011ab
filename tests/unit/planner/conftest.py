"""The API server of the planner's tests."""

from tests.unit.planner.api_servers import api_server

__all__ = ["api_server"]
