"""The calls by which a client's browser reaches the dashboard of the head, see `skyinfra.head.tunnel`."""

from __future__ import annotations

OPEN_CALL = "skyinfra_dashboard_open"
RECEIVE_CALL = "skyinfra_dashboard_receive"
SEND_CALL = "skyinfra_dashboard_send"
CLOSE_CALL = "skyinfra_dashboard_close"
