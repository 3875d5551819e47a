"""The run: session, ledger, coordinator, cluster and driver. Ray lives here."""
