"""Memory of one launch: weights, pools, headroom, verdict and advice."""
