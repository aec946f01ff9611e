//! The table of instructions: the opcode's parts, the operation, and its operands in their order.
//!
//! A field is an operand of this [`Kind`], or a value that the opcode gives.

use super::alu::alu;
use super::compare::{Compare, compare};
use super::convert::Convert;
use super::instr::{AtomicOp, Barrier, Logic, Mma, Shuffle, Vote, Wgmma, Wmma};
use super::matrix::{mma, wgmma, wmma};
use super::operand::{Addr, Guard, Space};
use super::reader::{A, D, DP, Ds, G, Global, Kind, Lit, P, Plain, Reader, S, Shared, Ss, T, Ts, bits, known};
use super::text::Operand;

macro_rules! instructions {
    (@type $kind:ty) => { <$kind as Kind>::Out };
    (@type $kind:ty = $value:expr) => { $kind };
    (@read $o:ident $kind:ty) => { $o.read::<$kind>()? };
    (@read $o:ident $kind:ty = $value:expr) => { $value };
    (
        $parts:ident, $o:ident, { $($special:tt)* }
        $(
            $(#[$doc:meta])*
            $pattern:pat $(if $guard:expr)? => $name:ident $({ $($field:ident: $kind:ty $(= $value:expr)?),* })?;
        )*
    ) => {
        /// Decoded operation. Operands are indices of registers and predicates; constants have
        /// their own registers.
        #[derive(Debug)]
        pub(crate) enum Op {
            $($special)*
            $($(#[$doc])* $name $({ $($field: instructions!(@type $kind $(= $value)?)),* })?,)*
        }

        /// Operation of a row of the table.
        fn row($parts: &[&str], $o: &mut Reader) -> Result<Option<Op>, String> {
            Ok(Some(match $parts {
                $($pattern $(if $guard)? => {
                    $($(let $field = instructions!(@read $o $kind $(= $value)?);)*)?
                    Op::$name $({ $($field),* })?
                })*
                _ => return Ok(None),
            }))
        }
    };
}

instructions! { parts, o,
    {
        Nop,
        Exit,
        Trap,
        Branch { target: u32 },
        /// `d = f(a, b, c)`.
        Alu(super::alu::Alu, [u32; 4]),
        Predicate { logic: Logic, d: u32, a: Guard, b: Guard },
        Mma(Box<Mma>),
        Wmma(Box<Wmma>),
        Wgmma(Box<Wgmma>),
        /// Not modelled: an error when it is executed.
        Unknown,
    }

    // Moves, bits and conversions.
    ["setp", name, ..] => Setp {
        compare: Compare = known(compare(name, o.ty()))?, d: P, a: T, b: T,
        combine: Option<(Logic, Guard)> = match o.logic() { Some(logic) => Some((logic, o.read::<G>()?)), None => None }
    };
    ["selp", ..] => Selp { d: D, a: T, b: T, p: G };
    /// `%globaltimer`, from bit `from` on.
    ["mov", ..] if timer(o).is_some() => Timer { from: u32 = timer(o).unwrap_or(0), d: D, bits: u32 = o.bits() };
    ["mov", ..] if o.length(1) > 0 && o.bits() <= 64 => Pack { d: D, parts: Ss<64>, bits: u32 = o.bits() / o.length(1) };
    ["mov", ..] if o.length(0) > 0 && o.bits() <= 64 => Unpack { parts: Ds, a: S<64>, bits: u32 = o.bits() / o.length(0) };
    ["mov", ..] if o.bits() <= 64 => Move { d: D, a: T };
    ["cvta", ..] if o.begins("shared") => ToShared { d: D, a: S<64>, to_generic: bool = !o.has("to") };
    ["isspacep", ..] => Isspacep { d: P, a: S<64>, space: Space = o.space() };
    ["cvt", ..] => Convert {
        convert: Convert = known(Convert::of(parts).filter(Convert::known))?, d: D, a: T,
        b: u32 = o.read_if::<T>(convert.packs())?.unwrap_or(0)
    };
    ["lop3", "b32"] => Lop3 { d: D, s: [u32; 3] = [o.read::<T>()?, o.read::<T>()?, o.read::<T>()?], table: Lit };
    ["bfi", ..] => Bfi {
        d: D, s: [u32; 4] = [o.read::<T>()?, o.read::<T>()?, o.read::<S<32>>()?, o.read::<S<32>>()?],
        bits: u64 = o.bits().into()
    };

    // Memory.
    ["ld" | "ldu", ..] if o.bits() <= 64 => Load {
        d: Ds, address: A, bytes: u32 = o.bits() / 8, signed: bool = o.ty().starts_with('s')
    };
    ["st", ..] if !o.has("async") && o.bits() <= 64 => Store { address: A, s: Ts, bytes: u32 = o.bits() / 8 };
    ["atom" | "red", ..] if !o.has("async") && !["v2", "v4", "v8"].iter().any(|vector| o.has(vector)) => Atomic {
        op: AtomicOp = o.atomic()?, ty: &'static str = known(ATOMIC_TYPES.into_iter().find(|ty| *ty == o.ty()))?,
        d: u32 = if parts[0] == "red" { o.names.new_register() } else { o.read::<D>()? },
        address: A, a: T, b: u32 = o.read_if::<T>(op == AtomicOp::Cas)?.unwrap_or(0)
    };

    // Warp.
    ["bar", "warp", "sync"] => SyncWarp { mask: S<32> };
    ["shfl", "sync", kind, ..] => Shuffle {
        kind: Shuffle = match *kind {
            "up" => Shuffle::Up,
            "down" => Shuffle::Down,
            "bfly" => Shuffle::Butterfly,
            _ => Shuffle::Index,
        },
        d: DP, a: S<32>, b: S<32>, c: S<32>, mask: S<32>
    };
    ["vote", "sync", "ballot", ..] => Ballot { d: D, p: G, mask: S<32> };
    ["vote", "sync", kind, ..] => Vote {
        kind: Vote = match *kind { "all" => Vote::All, "any" => Vote::Any, _ => Vote::Uniform }, d: P, p: G, mask: S<32>
    };
    ["match", kind, ..] => Match { d: DP, a: S<64>, mask: S<32>, all: bool = *kind == "all" };
    ["redux", ..] if !o.has("f32") => Redux {
        op: AtomicOp = o.atomic()?, signed: bool = o.has("s32"), d: D, a: S<32>, mask: S<32>
    };
    ["elect", ..] => Elect { d: DP, mask: S<32> };
    ["activemask", ..] => Activemask { d: D };
    ["ldmatrix", ..] if o.has("m8n8") && o.has("b16") => Ldmatrix { d: Ds, address: Shared, transposed: bool = o.has("trans") };
    ["stmatrix", ..] if o.has("m8n8") && o.has("b16") => Stmatrix {
        address: Shared, s: Ss<32>, transposed: bool = o.has("trans")
    };

    // Block and cluster.
    ["barrier", "cluster", "arrive", ..] => ClusterArrive;
    ["barrier", "cluster", "wait", ..] => ClusterWait;
    // `bar` is `barrier.aligned`.
    ["bar" | "barrier", ..] if !o.has("red") && (o.has("sync") || o.has("arrive")) => Bar {
        id: S<32>, count: Option<u32> = o.read_if::<S<32>>(o.more())?, wait: bool = o.has("sync"),
        aligned: bool = parts[0] == "bar" || o.has("aligned")
    };
    ["mapa", ..] => Mapa { d: D, a: S<64>, rank: S<32>, generic: bool = !o.has("shared::cluster") };
    ["mbarrier", wait @ ("test_wait" | "try_wait"), ..] => MbarrierWait {
        p: P, address: A, value: S<64>, parity: bool = o.has("parity"), may_block: bool = *wait == "try_wait"
    };
    ["mbarrier", kind, ..] if !o.has("noComplete") => Mbarrier {
        op: Barrier = match *kind {
            "init" => Barrier::Init,
            "inval" => Barrier::Invalidate,
            "expect_tx" => Barrier::ExpectTx,
            "complete_tx" => Barrier::CompleteTx,
            "arrive" | "arrive_drop" => Barrier::Arrive { expect: o.has("expect_tx"), drop: *kind == "arrive_drop" },
            _ => return Ok(None),
        },
        d: Option<u32> = o.read_if::<D>(!matches!(o.operands.first(), Some(Operand::Address(..))))?,
        address: A, value: Option<u32> = o.read_if::<S<32>>(o.more())?
    };
    ["fence", ..] if o.has("proxy") && o.begins("async") => FenceProxy;

    // Asynchronous copies. `wait_group.read` also waits for the writes, which may complete at any time.
    ["cp", "async", "bulk", "commit_group"] => BulkCommit;
    ["cp", "async", "bulk", "wait_group", ..] => BulkWait { pending: Lit };
    // The destination's state space comes first. Only tensor copies have `.cta_group`. An mbarrier of another block
    // needs a destination in the cluster.
    /// With `pair` the mbarrier may be in the other block of the pair (`.cta_group::2`).
    ["cp", "async", "bulk", rest @ ..] if loads(rest) => BulkLoad {
        to: Shared, from: Global, barrier: Shared,
        multicast: Option<u32> = o.read_if::<S<16>>(o.has("multicast::cluster"))?, pair: bool = o.has("cta_group::2")
    };
    ["cp", kind @ ("async" | "reduce"), "async" | "bulk", rest @ ..] if stores(kind, rest) => BulkStore {
        to: Global, from: Shared, add: bool = *kind == "reduce"
    };
    ["cp", "async", "commit_group"] => CpAsyncCommit;
    ["cp", "async", "wait_all"] => CpAsyncWait { pending: u32 = 0 };
    ["cp", "async", "mbarrier", "arrive", ..] => CpAsyncArrive { address: A, increment: bool = !o.has("noinc") };
    ["cp", "async", "ca" | "cg", ..] => CpAsync {
        to: Shared, from: Plain, size: Lit, source_size: Option<u32> = {
            let hint = parts.iter().any(|part| part.ends_with("cache_hint")) && o.operands.len() == 4;
            o.read_if::<S<32>>(o.more() && !hint)?
        }
    };

    // Warpgroup.
    ["wgmma", "fence", ..] => WgmmaFence;
    ["wgmma", "commit_group", ..] => WgmmaCommit;
    ["wgmma", "wait_group", ..] => WgmmaWait { pending: Lit };

    // Tensor memory, whose addresses are plain numbers.
    ["tcgen05", "fence::before_thread_sync"] => TensorBefore;
    ["tcgen05", "fence::after_thread_sync"] => TensorAfter;
    ["tcgen05", "alloc", ..] if o.has("shared::cta") => TensorAlloc { slot: Shared, columns: S<32> };
    ["tcgen05", "dealloc", ..] => TensorDealloc { address: S<32>, columns: S<32> };
    ["tcgen05", "relinquish_alloc_permit", ..] => TensorRelinquish;
    /// Arrives at one mbarrier. With a multicast mask, at the mbarrier of the same offset in each block of the mask.
    ["tcgen05", "commit", ..] if o.has("mbarrier::arrive::one") => TensorCommit {
        barrier: Shared, multicast: Option<u32> = o.read_if::<S<16>>(o.has("multicast::cluster"))?
    };
    /// `cp.32x128b.warpx4`, with the descriptor's register.
    ["tcgen05", "cp", _, "32x128b", "warpx4"] => TensorCopy { to: Plain, from: S<64> };
    /// Registers of the descriptors; addresses of the scales of A and B.
    ["tcgen05", "mma", "cta_group::1" | "cta_group::2", "kind::f8f6f4"]
    | ["tcgen05", "mma", "cta_group::1" | "cta_group::2", "kind::mxf8f6f4", "block_scale"]
    | ["tcgen05", "mma", "cta_group::1" | "cta_group::2", "kind::mxf8f6f4", "block_scale", "scale_vec::1X" | "block32"]
    if o.operands.len() == if o.has("block_scale") { 7 } else { 5 } => TensorMma {
        d: Plain, a: S<64>, b: S<64>, instruction: S<32>,
        scales: Option<[Addr; 2]> = if o.has("block_scale") { Some([o.read::<Plain>()?, o.read::<Plain>()?]) } else { None },
        keep: G
    };
    /// `ld.32x32b`.
    ["tcgen05", "ld", "sync", "aligned", "32x32b", count, "b32"] if **count == format!("x{}", o.length(0).max(1)) =>
        TensorLoad { d: Ds, address: Plain };
    ["tcgen05", "wait::ld", ..] => TensorWait;
}

/// Operation with an optional predicate.
#[derive(Debug)]
pub(crate) struct Instr {
    pub guard: Option<Guard>,
    pub op: Op,
}

const ATOMIC_TYPES: [&str; 13] =
    ["u32", "s32", "b32", "u64", "s64", "b64", "f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "b16"];

/// First bit of `%globaltimer` in a special register.
fn timer(o: &Reader) -> Option<u32> {
    match o.operands.get(1) {
        Some(Operand::Name(name)) if name == "%globaltimer" || name == "%globaltimer_lo" => Some(0),
        Some(Operand::Name(name)) if name == "%globaltimer_hi" => Some(32),
        _ => None,
    }
}

/// Whether a bulk copy is into shared memory: its destination is before its source.
fn into_shared(rest: &[&str]) -> Option<bool> {
    if rest.iter().any(|part| part.starts_with("im2col") || part.starts_with("tile::")) {
        return None;
    }
    let shared = rest.iter().position(|part| part.starts_with("shared::"))?;
    Some(shared < rest.iter().position(|part| *part == "global")?)
}

fn loads(rest: &[&str]) -> bool {
    let [is_tensor, pair, one, cluster] =
        ["tensor", "cta_group::2", "cta_group::1", "shared::cluster"].map(|part| rest.contains(&part));
    into_shared(rest) == Some(true) && (!pair || cluster) && (is_tensor || !(pair || one))
}

fn stores(kind: &str, rest: &[&str]) -> bool {
    let [is_tensor, add, group] = ["tensor", "add", "bulk_group"].map(|part| rest.contains(&part));
    into_shared(rest) == Some(false) && group && (kind == "async" || add && is_tensor)
}

/// Decodes an operation.
///
/// # Errors
/// It is not modelled, or its operands do not fit.
pub(crate) fn decode(o: &mut Reader) -> Result<Op, String> {
    let parts = o.parts;
    if parts[0] == "tcgen05" {
        o.names.cta_group(parts)?;
    }
    Ok(match parts {
        ["bra", ..] => {
            let Operand::Name(label) = o.next()? else { return Err("no label".into()) };
            o.label = Some(label.clone());
            Op::Nop
        }
        ["ret" | "exit", ..] => Op::Exit,
        ["trap" | "brkpt", ..] => Op::Trap,
        [
            "membar" | "pragma" | "nanosleep" | "prefetch" | "prefetchu" | "setmaxnreg" | "griddepcontrol" | "discard"
            | "applypriority",
            ..,
        ]
        | ["cp", "async", "bulk", "prefetch", ..] => Op::Nop,
        ["fence", ..] if !(o.has("proxy") && o.begins("async")) => Op::Nop,
        ["mov" | "not" | "and" | "or" | "xor", .., "pred"] => {
            let (d, _) = o.read::<P>()?;
            let (p, negated) = o.read::<G>()?;
            match o.logic() {
                Some(logic) => Op::Predicate { logic, d, a: (p, negated), b: o.read::<G>()? },
                None => Op::Predicate { logic: Logic::Or, d, a: (p, negated ^ (parts[0] == "not")), b: (0, false) },
            }
        }
        ["cp", "async", "wait_group"] => Op::CpAsyncWait { pending: o.read::<Lit>()? },
        ["wgmma", "mma_async", "sync", "aligned", shape, ..] => Op::Wgmma(Box::new(wgmma(o, shape)?)),
        ["mma", "sync", "aligned", shape, "row", "col", ..] => Op::Mma(Box::new(mma(o, shape)?)),
        ["wmma", kind, matrix, ..] => Op::Wmma(Box::new(wmma(o, kind, matrix)?)),
        _ => match row(parts, o)? {
            Some(op) => op,
            None => {
                let (arity, function) = known(alu(parts).filter(|(arity, _)| arity + 1 == o.operands.len()))?;
                let mut registers = [o.read::<D>()?, 0, 0, 0];
                for (i, register) in registers.iter_mut().enumerate().skip(1).take(arity) {
                    let wide = parts[0] == "mad" && o.has("wide") && i == 3;
                    let operand = o.next()?;
                    *register = o.names.source(operand, if wide { 64 } else { bits(o.ty()) })?;
                }
                Op::Alu(function, registers)
            }
        },
    })
}
