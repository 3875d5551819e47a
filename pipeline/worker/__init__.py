"""The worker: it leases rows, keeps one engine full and publishes what it finishes. No Ray here."""
