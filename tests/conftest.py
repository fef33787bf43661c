def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="run the several hundred drawn layouts of docs/parity.md")
