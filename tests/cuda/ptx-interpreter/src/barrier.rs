//! `mbarrier` objects in shared memory, and the named barriers of a block.

/// State of an mbarrier. The PTX ISA does not define its 64 bits; here the highest two mark it as
/// initialized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mbarrier {
    pub expected: u32,
    pub pending: u32,
    /// Announced bytes that have not arrived; negative if they arrived first.
    pub tx: i32,
    pub phase: bool,
}

const MAX_COUNT: u32 = (1 << 20) - 1;
const TX_BIAS: i32 = 1 << 20;

impl Mbarrier {
    pub(crate) fn new(count: u32) -> Result<Self, String> {
        if count == 0 || count > MAX_COUNT {
            return Err(format!("an mbarrier of {count} arrivals"));
        }
        Ok(Self { expected: count, pending: count, tx: 0, phase: false })
    }

    pub(crate) fn from_bits(bits: u64) -> Result<Self, String> {
        if bits >> 62 != 0b01 {
            return Err("the mbarrier is not initialized".into());
        }
        Ok(Self {
            pending: (bits & 0xf_ffff) as u32,
            expected: (bits >> 20 & 0xf_ffff) as u32,
            tx: (bits >> 40 & 0x1f_ffff) as i32 - TX_BIAS,
            phase: bits >> 61 & 1 != 0,
        })
    }

    pub(crate) fn bits(self) -> u64 {
        1 << 62
            | u64::from(self.phase) << 61
            | ((self.tx + TX_BIAS) as u64) << 40
            | u64::from(self.expected) << 20
            | u64::from(self.pending)
    }

    pub(crate) fn expect(&mut self, bytes: u32) -> Result<(), String> {
        self.tx = self.tx.saturating_add_unsigned(bytes);
        self.check_tx()
    }

    pub(crate) fn complete(&mut self, bytes: u32) -> Result<(), String> {
        self.tx = self.tx.saturating_sub_unsigned(bytes);
        self.check_tx()?;
        self.turn();
        Ok(())
    }

    pub(crate) fn arrive(&mut self, count: u32, drop: bool) -> Result<(), String> {
        if count > self.pending {
            return Err(format!("{count} arrivals at an mbarrier that waits for {} more in this phase", self.pending));
        }
        if drop {
            self.expected -= count.min(self.expected);
        }
        self.pending -= count;
        self.turn();
        Ok(())
    }

    fn check_tx(self) -> Result<(), String> {
        if self.tx.abs() >= TX_BIAS {
            return Err(format!("{} bytes outstanding at an mbarrier", self.tx));
        }
        Ok(())
    }

    fn turn(&mut self) {
        if self.pending == 0 && self.tx == 0 {
            self.phase = !self.phase;
            self.pending = self.expected;
        }
    }

    /// Whether a phase is over: the phase of this parity, or the phase in which the state was
    /// taken.
    pub(crate) fn is_over(self, value: u64, parity: bool) -> bool {
        let phase = if parity { value & 1 != 0 } else { value >> 61 & 1 != 0 };
        self.phase != phase
    }
}

/// One of the 16 barriers of a block.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Named {
    /// Threads that arrived in this phase.
    pub arrived: u32,
    /// Required number of threads; None for all of the block.
    pub count: Option<u32>,
    pub generation: u64,
}

impl Named {
    /// Records the arrival of `threads` threads. `live` is the number of threads in warps of the
    /// block that still run.
    pub(crate) fn arrive(&mut self, threads: u32, count: Option<u32>, live: u32) -> Result<(), String> {
        if let Some(count) = count
            && (count == 0 || !count.is_multiple_of(32))
        {
            return Err(format!("a barrier of {count} threads"));
        }
        if self.arrived > 0 && self.count != count {
            return Err(format!("a barrier of {count:?} threads, of which others say {:?}", self.count));
        }
        self.count = count;
        self.arrived += threads;
        self.turn(live)
    }

    /// Opens the barrier if all threads have arrived.
    pub(crate) fn turn(&mut self, live: u32) -> Result<(), String> {
        let expected = self.count.unwrap_or(live);
        if self.arrived > expected && self.arrived > 0 && self.count.is_some() {
            return Err(format!("{} threads at a barrier of {expected}", self.arrived));
        }
        if self.arrived > 0 && self.arrived >= expected {
            *self = Self { arrived: 0, count: None, generation: self.generation + 1 };
        }
        Ok(())
    }
}
