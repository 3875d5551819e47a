"""What goes over the wire to a server, and what comes back: bounded, and never trusted."""
