"""Forecasts of memory, speed, time and cost. Pure: no clock, disk write, network or Ray."""
