"""One request in, one outcome out: the engines and how they are started and asked."""
