"""What the job does, one verb a module. Imports point down; see tests/test_architecture.py."""
