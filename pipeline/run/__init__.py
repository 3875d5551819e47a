"""The run: session, ledger, coordinator, workers and cluster. Ray lives here."""
