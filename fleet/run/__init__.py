"""One run in AWS as every verb sees it: session, fleet (`engine`), machines, ssh, secrets."""
