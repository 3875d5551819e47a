"""The memory planner: pure arithmetic from a model, a card and launch flags to a forecast.

No clock, no network, no Ray. Files are read in `model_files` alone.
"""
