"""Positions of charts' marks, in percent of a chart's own width and height. Pure.

There is no colour and no markup here. A chart grows with the page and its text does not, so that a
phone shows the same letters as a desktop. Heights count from the bottom, except in the points of
an SVG shape, where they count from the top.
"""
