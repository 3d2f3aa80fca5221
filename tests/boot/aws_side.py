"""What an instance in a network of its own meets of AWS."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from instance_network import GATEWAY, METADATA, InstanceNetwork
from werkzeug.serving import WSGIRequestHandler, make_server

from spotheal.fleet.rehearsal.services.imds import Imds

if TYPE_CHECKING:
    from spotheal.fleet.rehearsal.scenarios.cloud import Cloud


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: object) -> None:
        pass


class AwsSide:
    """The metadata service at its own address, and all else at the gateway's, until `close`."""

    def __init__(self, cloud: Cloud, instance: str, network: InstanceNetwork) -> None:
        self.imds = Imds(cloud.rules, instance, network.listen(METADATA))
        self._listener = network.listen(GATEWAY)
        cloud.endpoint.hosts.add(GATEWAY)
        self._api = make_server(
            GATEWAY, 80, cloud.endpoint, threaded=True, request_handler=_Quiet, fd=self._listener.fileno()
        )
        self._thread = threading.Thread(target=self._api.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.imds.close()
        self._api.shutdown()
        self._thread.join(5)
        self._api.server_close()
        self._listener.close()
