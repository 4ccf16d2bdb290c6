//! The fabric's generator: small, seeded, the same on every platform, so that every run repeats.

use super::OneIn;

/// xorshift64*.
pub(super) struct Rng(u64);

impl Rng {
    pub(super) fn new(seed: u64) -> Rng {
        // Spreads close seeds apart; the state may not be 0.
        Rng((seed ^ 0x9E37_79B9_7F4A_7C15).wrapping_mul(0xD134_2543_DE82_EF95) | 1)
    }

    pub(super) fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// 0 to `bound` - 1; 0 for a bound of 0. Bounds are below 2^32.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        (((self.bits() >> 32) * bound as u64) >> 32) as usize
    }

    pub(super) fn one_in(&mut self, odds: OneIn) -> bool {
        odds == 1 || (odds > 1 && self.below(odds as usize) == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_repeat_and_cover_their_range() {
        let draw = |seed| {
            let mut rng = Rng::new(seed);
            (0..8).map(|_| rng.bits()).collect::<Vec<_>>()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
        let mut rng = Rng::new(0);
        let mut seen = [0; 5];
        for _ in 0..1000 {
            seen[rng.below(5)] += 1;
        }
        assert!(seen.iter().all(|&n| (150..250).contains(&n)), "{seen:?}");
        assert_eq!((0..1000).filter(|_| rng.one_in(0)).count(), 0);
        assert_eq!((0..1000).filter(|_| rng.one_in(1)).count(), 1000);
    }
}
