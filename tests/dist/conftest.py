import pytest

from tests.dist.pool import Pool


@pytest.fixture(scope="session")
def ranks():
    """``ranks(world_size, function, *arguments)``: call a function on that many gloo ranks."""
    pools: dict[int, Pool] = {}

    def run(world_size, function, *arguments, **options):
        pool = pools.setdefault(world_size, Pool(world_size))
        return pool.run(function, *arguments, **options)

    yield run
    for pool in pools.values():
        pool.close()
