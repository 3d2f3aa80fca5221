"""The operator's side: `fleetctl`. One function a verb in `cli`, the rest are libraries that neither print nor exit."""
