"""`ModelService`."""

from __future__ import annotations

from grpc import ServicerContext

from aengine.engine.async_engine import AsyncEngine
from aengine.server.generation.backend import require_model
from aengine.server.generation.responses import write_model
from aengine.v1.model_service_pb2 import GetModelRequest, GetModelResponse, ListModelsRequest, ListModelsResponse
from aengine.v1.model_service_pb2_grpc import ModelServiceServicer


class ModelServicer(ModelServiceServicer):
    """Describes the model of `engine`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def GetModel(self, request: GetModelRequest, context: ServicerContext) -> GetModelResponse:
        response = GetModelResponse()
        write_model(require_model(self._engine, request.model), response.model)
        return response

    async def ListModels(self, request: ListModelsRequest, context: ServicerContext) -> ListModelsResponse:
        response = ListModelsResponse()
        write_model(require_model(self._engine, ""), response.models.add())
        return response
