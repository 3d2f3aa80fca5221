"""The example trainer: data, models, loop, options."""
