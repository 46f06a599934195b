import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.algorithms.off_policy import off_policy_weights
from rl.algorithms.policy_loss import clipped_loss, importance_ratio, probability_ratio

# ratio, advantage, loss and whether it is clipped, at bounds 0.2 below and 0.3 above.
CASES = [
    (1.0, 2.0, -2.0, False),
    (1.25, 2.0, -2.5, False),
    (1.5, 2.0, -2.6, True),  # held at 1.3
    (0.5, 2.0, -1.0, False),  # pushed back up: no bound
    (0.9, -1.0, 0.9, False),
    (0.5, -1.0, 0.8, True),  # held at 0.8
    (1.5, -1.0, 1.5, False),  # pushed back down: no bound
    (1.5, 0.0, 0.0, False),
]
RATIO, ADVANTAGE, LOSS, IS_CLIPPED = (np.array(column) for column in zip(*CASES, strict=True))


def clipped_ratio_loss(policy, proximal, advantages, low, high, kind="ppo", dual=3.0):
    is_trained, segments = jnp.ones_like(policy, bool), jnp.zeros_like(policy, int)
    ratio = importance_ratio(policy, proximal, "token", is_trained, segments)
    return clipped_loss(kind, ratio, policy, advantages, low, high, dual)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_values(transform):
    proximal = jnp.full(len(CASES), -1.5)
    policy = proximal + jnp.log(RATIO)
    loss, is_clipped = transform(clipped_ratio_loss)(policy, proximal, ADVANTAGE, 0.2, 0.3)
    np.testing.assert_allclose(loss, LOSS, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(is_clipped, IS_CLIPPED)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_gradient_is_minus_ratio_times_advantage_and_zero_where_clipped(transform):
    proximal = jnp.full(len(CASES), -1.5)

    def total(policy, proximal):
        return clipped_ratio_loss(policy, proximal, jnp.asarray(ADVANTAGE), 0.2, 0.3)[0].sum()

    policy = proximal + jnp.log(RATIO)
    of_policy, of_proximal = transform(jax.grad(total, argnums=(0, 1)))(policy, proximal)
    expected = np.where(IS_CLIPPED, 0.0, -RATIO * ADVANTAGE)
    np.testing.assert_allclose(of_policy, expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(of_proximal, 0.0)


@settings(deadline=None)
@given(
    st.lists(st.floats(-60, 0, width=32), min_size=1, max_size=8),
    st.floats(-5, 5, width=32, allow_subnormal=False),  # XLA takes those for 0
    st.sampled_from([0.0, 0.2]),
)
def test_on_policy_the_ratio_is_exactly_one(logprobs, advantage, clip):
    logprobs = jnp.array(logprobs, jnp.float32)
    advantages = jnp.full_like(logprobs, advantage)

    def total(policy):
        loss, is_clipped = clipped_ratio_loss(policy, logprobs, advantages, clip, clip)
        return loss.sum(), (loss, is_clipped)

    gradient, (loss, is_clipped) = jax.grad(total, has_aux=True)(logprobs)
    np.testing.assert_array_equal(probability_ratio(logprobs, logprobs), 1.0)
    np.testing.assert_array_equal(loss, -advantages)
    np.testing.assert_array_equal(gradient, -advantages)  # whole, even on a bound of width 0
    assert not is_clipped.any()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [-1000.0, 1000.0])
def test_an_absurd_ratio_has_a_finite_loss_and_gradient(advantage, log_ratio):
    def loss(policy):
        return clipped_ratio_loss(policy, jnp.float32(-1.0), jnp.float32(advantage), 0.2, 0.2)[0]

    value, gradient = jax.value_and_grad(loss)(jnp.float32(-1.0 + log_ratio))
    assert np.isfinite(value)
    assert np.isfinite(gradient)


def test_a_bound_on_one_side_alone():
    policy = jnp.log(jnp.array([0.01, 4.0]))
    loss, is_clipped = clipped_ratio_loss(policy, jnp.zeros(2), jnp.array([-1.0, 1.0]), None, 2.0)
    np.testing.assert_allclose(loss, [0.01, -3.0], rtol=1e-6)
    np.testing.assert_array_equal(is_clipped, [False, True])


# kind, ratio, advantage, loss, gradient by the policy's log-probability (which is -0.5), clipped
OTHER_KINDS = [
    ("dual", 5.0, -2.0, 6.0, 0.0, True),  # held at 3 * 2
    ("dual", 2.5, -2.0, 5.0, 5.0, False),
    ("dual", 5.0, 2.0, -2.6, 0.0, True),  # PPO's bound above
    ("dual", 0.5, -2.0, 1.6, 0.0, True),  # and below
    ("cispo", 5.0, 2.0, 1.3 * 2.0 * 0.5, -1.3 * 2.0, True),  # clipped, and yet a gradient
    ("cispo", 0.5, 2.0, 0.8 * 2.0 * 0.5, -0.8 * 2.0, True),
    ("cispo", 1.1, -2.0, -1.1 * 2.0 * 0.5, 1.1 * 2.0, False),
    ("none", 5.0, 2.0, -10.0, -10.0, False),
    ("none", 0.01, -2.0, 0.02, 0.02, False),
]


@pytest.mark.parametrize(("kind", "ratio", "advantage", "loss", "slope", "clipped"), OTHER_KINDS)
def test_other_kinds_of_clipping(kind, ratio, advantage, loss, slope, clipped):
    def loss_of(policy):
        found = clipped_ratio_loss(
            policy, policy0 - jnp.log(ratio), jnp.float32(advantage), 0.2, 0.3, kind
        )
        return found[0], found[1]

    policy0 = jnp.float32(-0.5)
    (value, is_clipped), gradient = jax.value_and_grad(loss_of, has_aux=True)(policy0)
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    np.testing.assert_allclose(gradient, slope, rtol=1e-5, atol=1e-7)
    assert bool(is_clipped) is clipped


# A row with the sequences 4 (three tokens, the second not trained on), 0 (two) and padding.
SEGMENTS = jnp.array([[4, 4, 4, 0, 0, -1]])
IS_TRAINED = jnp.array([[True, False, True, True, True, False]])


def by_sequence(policy, proximal):
    return importance_ratio(policy, proximal, "sequence", IS_TRAINED, SEGMENTS)


def test_the_ratio_of_a_sequence_is_the_geometric_mean_over_its_trained_tokens():
    proximal = jnp.zeros((1, 6))
    policy = jnp.log(jnp.array([[2.0, 99.0, 0.5 * 9, 4.0, 0.25, 7.0]]))
    ratio = by_sequence(policy, proximal)
    np.testing.assert_allclose(ratio, [[3.0, 1.0, 3.0, 1.0, 1.0, 1.0]], rtol=1e-6)


def test_the_gradient_of_a_sequence_ratio_is_that_of_the_plain_formula():
    generator = np.random.default_rng(0)
    policy, proximal = jnp.asarray(generator.normal(size=(2, 1, 6)), jnp.float32)
    weights = jnp.asarray(generator.normal(size=(1, 6)), jnp.float32) * IS_TRAINED

    def plain(policy):
        d = policy[0] - proximal[0]
        first, second = jnp.exp((d[0] + d[2]) / 2), jnp.exp((d[3] + d[4]) / 2)
        w = weights[0]
        return (w[0] + w[2]) * first + (w[3] + w[4]) * second

    actual = jax.jit(jax.grad(lambda p: jnp.sum(weights * by_sequence(p, proximal))))(policy)
    np.testing.assert_allclose(actual, jax.grad(plain)(policy), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_what_is_not_trained_on_may_be_nan(level):
    proximal = jnp.where(IS_TRAINED, -1.0, jnp.nan)

    def total(policy):
        return importance_ratio(policy, proximal, level, IS_TRAINED, SEGMENTS).sum()

    for elsewhere in (-1.0, jnp.nan):
        policy = jnp.where(IS_TRAINED, -1.0, elsewhere)
        ratio, gradient = jax.value_and_grad(total)(policy)
        assert ratio == 6.0
        np.testing.assert_allclose(gradient, jnp.where(IS_TRAINED, 1.0, 0.0), rtol=1e-6)


@settings(deadline=None)
@given(st.lists(st.floats(-60, 0, width=32), min_size=6, max_size=6))
def test_on_policy_the_ratio_of_a_sequence_is_exactly_one(logprobs):
    logprobs = jnp.array([logprobs], jnp.float32)
    np.testing.assert_array_equal(by_sequence(logprobs, logprobs), 1.0)


def test_the_mean_over_a_sequence_asks_for_all_bits():
    """An accelerator's default would round log-ratios by more than GSPO's bounds."""
    program = jax.make_jaxpr(lambda policy: by_sequence(policy, jnp.zeros((1, 6))))(
        jnp.ones((1, 6))
    )
    products = [e for e in program.eqns if e.primitive.name == "dot_general"]
    for product in products:
        assert set(product.params["precision"]) == {jax.lax.Precision.HIGHEST}
    assert products


# Two prompts with two bins of six places. Both bins of a prompt number its sequences, and prompts
# share the numbers.
BINS = np.array(
    [[[0, 0, 2, 2, 2, -1], [1, 1, 1, 1, -1, -1]], [[0, 0, 0, 0, 0, 0], [2, 1, 1, 1, 1, -1]]]
)


def drawn_bins():
    draw = np.random.RandomState(3)
    is_trained = (BINS >= 0) & (draw.rand(*BINS.shape) > 0.2)
    policy, shift, advantages = draw.standard_normal((3, *BINS.shape)).astype(np.float32)
    by_member = np.take_along_axis(advantages.reshape(2, -1), BINS.reshape(2, -1) % 3, axis=1)
    return policy, policy - 0.2 * shift, by_member.reshape(BINS.shape), is_trained


def plain_gspo(policy, proximal, advantages, is_trained):
    """GSPO's equation 5 a sequence at a time, without the mean over sequences."""
    total = 0.0
    for prompt in range(2):
        for member in range(3):
            places = np.nonzero((BINS[prompt] == member) & is_trained[prompt])
            d = policy[prompt][places] - proximal[prompt][places]
            ratio, advantage = jnp.exp(jnp.sum(d) / len(d)), advantages[prompt][places][0]
            total -= jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.95, 1.08) * advantage)
    return total


def packed_gspo(policy, proximal, advantages, is_trained, segments, num_mates):
    ratio = importance_ratio(policy, proximal, "sequence", is_trained, segments)
    loss, is_clipped = clipped_loss("ppo", ratio, policy, advantages, 0.05, 0.08, 3.0)
    return jnp.sum(jnp.where(is_trained, loss / num_mates, 0.0)), is_clipped & is_trained


def test_packed_gspo_has_the_loss_and_gradient_of_the_formula_also_mapped_over_devices():
    policy, proximal, advantages, is_trained = drawn_bins()
    mates = (BINS[..., :, None] == BINS[..., None, :]) & is_trained[..., None, :]
    given = proximal, advantages, is_trained, BINS, np.maximum(mates.sum(axis=-1), 1)
    expected, expected_gradient = jax.value_and_grad(plain_gspo)(
        policy, proximal, advantages, is_trained
    )
    differentiate = jax.value_and_grad(packed_gspo, has_aux=True)
    (loss, is_clipped), gradient = jax.jit(differentiate)(policy, *given)
    assert 0 < is_clipped.sum() < is_trained.sum()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-6)

    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    sharded = jax.device_put((policy, *given), place)
    (losses, _), mapped = jax.jit(jax.vmap(differentiate, spmd_axis_name="rows"))(*sharded)
    np.testing.assert_allclose(losses.sum(), expected, rtol=1e-5)
    np.testing.assert_allclose(mapped, expected_gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["ppo", "dual", "cispo", "none"])
def test_no_advantage_is_no_loss_and_no_gradient(kind, level):
    """As equal rewards have it, whatever the ratio is."""
    policy, proximal, _, is_trained = drawn_bins()

    def total(policy):
        ratio = importance_ratio(policy, proximal, level, is_trained, BINS)
        return clipped_loss(kind, ratio, policy, jnp.zeros(BINS.shape), 0.2, 0.3, 3.0)[0].sum()

    loss, gradient = jax.value_and_grad(total)(policy)
    assert loss == 0
    np.testing.assert_array_equal(gradient, 0.0)


# Two sequences of three tokens; the last of the second is masked, and holds nothing to read.
PROXIMAL = np.log([[0.5, 0.2, 0.9], [0.3, 0.3, 1.0]]).astype(np.float32)
BEHAVIOUR = np.log([[0.25, 0.4, 0.1], [0.3, 0.6, 1.0]]).astype(np.float32)
MASK = np.array([[True, True, True], [True, True, False]])
PROXIMAL[1, 2], BEHAVIOUR[1, 2] = np.nan, -np.inf


def test_off_policy_weights_of_tokens():
    found = off_policy_weights(PROXIMAL, BEHAVIOUR, MASK, "token", 3.0)
    np.testing.assert_allclose(found.weights, [[2.0, 0.5, 3.0], [1.0, 0.5, 0.0]], rtol=1e-6)
    assert found.weights.dtype == np.float32
    assert found.effective_share == pytest.approx(7.0**2 / (4 + 0.25 + 9 + 1 + 0.25) / 5)
    assert found.truncated_share == pytest.approx(1 / 5)
    assert found.ratio_mean == pytest.approx((2 + 0.5 + 9 + 1 + 0.5) / 5)


def test_off_policy_weights_of_sequences_are_the_products_over_their_tokens():
    found = off_policy_weights(PROXIMAL, BEHAVIOUR, MASK, "sequence", 4.0)
    np.testing.assert_allclose(found.weights, [[4.0] * 3, [0.5, 0.5, 0.0]], rtol=1e-6)
    assert found.effective_share == pytest.approx(4.5**2 / (16 + 0.25) / 2)
    assert found.truncated_share == pytest.approx(1 / 2)
    assert found.ratio_mean == pytest.approx((9 + 0.5) / 2)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rollouts_of_the_proximal_policy_weigh_exactly_one(level):
    found = off_policy_weights(PROXIMAL, PROXIMAL, MASK, level, 1.0)
    np.testing.assert_array_equal(found.weights, MASK)
    assert found[1:] == (1.0, 0.0, 1.0)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_absurd_off_policy_ratios_stay_finite(level):
    far = np.where(MASK, -1000.0, 0.0)
    small = off_policy_weights(far, np.zeros((2, 3)), MASK, level, 2.0)
    large = off_policy_weights(np.zeros((2, 3)), far, MASK, level, 2.0)
    np.testing.assert_array_equal(large.weights, 2.0 * MASK)
    assert (small.weights[MASK] < 1e-8).all()
    assert np.isfinite([*small[1:], *large[1:]]).all()
    assert large.truncated_share == 1.0


def test_no_token_at_all_has_no_weight():
    found = off_policy_weights(PROXIMAL, BEHAVIOUR, np.zeros((2, 3), bool), "token", 2.0)
    np.testing.assert_array_equal(found.weights, 0.0)
    assert found[1:] == (1.0, 0.0, 1.0)
