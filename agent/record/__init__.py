"""What is written down for others: ledger, status, logs, results, metrics, the watchdog."""
