"""The operator's files (spot_fleet_config.json, job.toml): read, and checked without AWS."""
