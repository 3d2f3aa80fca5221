"""What every part agrees on: names, job.toml, the contract with the trainer, errors, the clock."""
