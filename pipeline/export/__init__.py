"""Exports of a run: data sets for training, with their card, in a folder, a store or the hub."""
