"""Heals the job's volume: observe (all IO), plan (pure), act (no opinions), heal (the loop)."""
