"""Requests that a web page makes: any page can send a form to a port of this machine, and DNS can lead any name here.

Source: Fetch Standard ("Origin" and "Sec-Fetch-Site" headers), RFC 9110 on Host and Referer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

LOOPBACK = ("127.0.0.1", "localhost")


def refusal(header: Callable[[str], str], hosts: Collection[str]) -> str:
    """Why a request is refused, "" if it is not. `hosts`: the names and ports that the server is reached by."""
    if header("Host") not in hosts:
        return "this server is reached by its loopback address alone"
    if header("Origin") or header("Referer") or header("Sec-Fetch-Site") not in ("", "none"):
        return "no web page may call this server"
    return ""
