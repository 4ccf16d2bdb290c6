//! The simulator's only source of chance: xoshiro256**, seeded by splitmix64, with integer and basic floating-point
//! operations only, so that a seed gives the same run on every machine.

/// A seeded generator.
#[derive(Clone, Debug)]
pub struct Rng {
    state: [u64; 4],
}

fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

impl Rng {
    /// A generator for one purpose of one seed: what one purpose draws does not shift what another does.
    pub fn new(seed: u64, purpose: u64) -> Rng {
        let mut state = seed ^ purpose.wrapping_mul(0xD1B5_4A32_D192_ED03);
        Rng { state: std::array::from_fn(|_| splitmix(&mut state)) }
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        let result = self.state[1].wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let shifted = self.state[1] << 17;
        self.state[2] ^= self.state[0];
        self.state[3] ^= self.state[1];
        self.state[1] ^= self.state[2];
        self.state[0] ^= self.state[3];
        self.state[2] ^= shifted;
        self.state[3] = self.state[3].rotate_left(45);
        result
    }

    /// A number below `end`; 0 when `end` is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(end)) >> 64) as u64
    }

    /// A number from `low` to `high`, both included.
    pub fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low).saturating_add(1))
    }

    /// A number from `low` to `high` with every factor of two equally likely.
    pub fn scale(&mut self, low: u64, high: u64) -> u64 {
        let steps = (high / low.max(1)).max(1).ilog2();
        let base = low << self.below(u64::from(steps) + 1);
        self.range(base, (2 * base).min(high).max(base))
    }

    /// True in `percent` of 100 cases.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// One of the choices.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }

    /// An exponentially distributed time with this mean: the gap between events of a Poisson process.
    pub fn gap(&mut self, mean_ns: u64) -> u64 {
        let uniform = ((self.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64;
        (mean_ns as f64 * -ln(uniform)) as u64
    }
}

/// The natural logarithm of a number in (0, 1], from basic operations: libraries differ in the last bit.
fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let exponent = ((bits >> 52) as i64 - 1023) as f64;
    let mantissa = f64::from_bits(bits & ((1 << 52) - 1) | (1023 << 52));
    let z = (mantissa - 1.0) / (mantissa + 1.0);
    let square = z * z;
    let series = 1.0 + square * (1.0 / 3.0 + square * (0.2 + square * (1.0 / 7.0 + square / 9.0)));
    exponent * std::f64::consts::LN_2 + 2.0 * z * series
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_repeat_and_stay_in_range() {
        let draw = |seed, purpose| Rng::new(seed, purpose).bits();
        assert_eq!(draw(7, 1), draw(7, 1));
        assert_ne!(draw(7, 1), draw(7, 2));
        assert_ne!(draw(7, 1), draw(8, 1));
        let mut rng = Rng::new(1, 1);
        for _ in 0..1000 {
            assert!((3..=5).contains(&rng.range(3, 5)));
            assert!((10..=1000).contains(&rng.scale(10, 1000)));
        }
        assert_eq!(rng.below(0), 0);
        let mean = (0..10_000).map(|_| rng.gap(1000)).sum::<u64>() / 10_000;
        assert!((950..1050).contains(&mean), "the mean gap is {mean}");
    }
}
