//! `tcgen05` on a pair of blocks: distribution of a product, targets of loads and commits, and
//! errors for omitted steps.

use ptx_interpreter::TensorMap;

use super::{bytes_of, module, run, small, words, zeros};

const CLUSTER: &str = ".explicitcluster\n.reqnctapercluster 2, 1, 1";

const MEET: &str = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;";

/// Statements that a test can omit or replace.
#[derive(Clone, Copy)]
struct Program {
    /// `.cta_group` of the product.
    group: u32,
    instruction: u32,
    commit: &'static str,
    /// Barriers before tensor memory is allocated and before it is deallocated.
    meet: &'static str,
    meet_again: &'static str,
    /// Code of the same thread after the commit.
    then: &'static str,
    /// Columns that block 1 allocates; block 0 allocates 64.
    columns: u32,
}

const COLUMNS: usize = 32;

/// Bytes of the scale words of A and B that the product uses.
const SCALE_IDS: [u32; 2] = [2, 1];

/// E4M3 by E4M3, E8M0 scales, M = 256.
const INSTRUCTION: u32 =
    SCALE_IDS[1] << 4 | (COLUMNS as u32 >> 3) << 17 | 1 << 23 | (256 >> 7) << 27 | SCALE_IDS[0] << 29;

/// Core matrices of 8 rows of 16 bytes: 128 bytes apart along K, 256 along rows; not swizzled,
/// version 1.
const PLAIN: u64 = (128 >> 4) << 16 | (256 >> 4) << 32 | 1 << 46;

/// 32 rows of 16 bytes.
const SCALES: u64 = (128 >> 4) << 32 | 1 << 46;

const PROGRAM: Program = Program {
    group: 2,
    instruction: INSTRUCTION,
    commit: "mov.u16 %h1, 3;
        tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r8], %h1;",
    meet: MEET,
    meet_again: MEET,
    then: "",
    columns: 64,
};

fn place(row: usize, k: usize) -> usize {
    row / 8 * 256 + k / 16 * 128 + row % 8 * 16 + k % 16
}

/// Exponent of a row's scale.
fn exponent(row: usize, salt: usize) -> usize {
    (row * 5 + salt) % 7
}

/// Bytes of a block's operands and scales: 128 rows of A, half of B, and the scales of its rows of
/// A and of B.
const IMAGE: usize = 5632;

fn image(rank: usize) -> Vec<u8> {
    let mut image = vec![0xff; IMAGE];
    for (base, rows, first, salt) in [(0, 128, 128 * rank, 0), (4096, COLUMNS / 2, COLUMNS / 2 * rank, 1)] {
        for row in 0..rows {
            for k in 0..32 {
                image[base + place(row, k)] = small(salt * 10_000 + (first + row) * 32 + k).0;
            }
        }
    }
    for (base, rows, first, salt) in [(4608, 128, 128 * rank, 0), (5120, COLUMNS, 0, 1)] {
        for row in 0..rows {
            let at = base + row % 32 * 16 + row / 32 * 4 + SCALE_IDS[salt] as usize;
            image[at] = 127 + exponent(first + row, salt) as u8;
        }
    }
    image
}

/// `D [256][32] = (A · 2^e) [256][32] · (B · 2^f) [32][32]ᵀ` on a pair of blocks.
fn product(program: Program, seed: u64) -> Result<(), String> {
    let Program { group, instruction, commit, meet, meet_again, then, columns } = program;
    let copies = (0..11).map(|i| i * 512);
    let copies: String =
        copies.map(|at| format!("ld.global.u32 %r10, [%d4+{at}]; st.shared.u32 [%r4+{at}], %r10;")).collect();
    let registers = (10..10 + COLUMNS).map(|i| format!("%f{i}")).collect::<Vec<_>>().join(", ");
    let stores: String = (0..COLUMNS).map(|i| format!("st.global.f32 [%d6+{}], %f{};", 4 * i, 10 + i)).collect();
    // A, then B at byte 4096, the scales of A at 4608 and of B at 5120; two mbarriers, and the slot
    // of the address.
    let body = format!(
        ".shared .align 1024 .b8 s[6168]; mov.u32 %r1, %tid.x; mov.u32 %r20, %cluster_ctarank;
        ld.param.u64 %d1, [f_param_0]; ld.param.u64 %d2, [f_param_1]; mad.lo.s32 %r2, %r20, {IMAGE}, 0; shl.b32 %r3, %r1, 2;
        add.u32 %r2, %r2, %r3; cvt.u64.u32 %d3, %r2; add.s64 %d4, %d1, %d3; mov.u32 %r2, s; add.u32 %r4, %r2, %r3; mov.u32 %r3, %r2;
        {copies} fence.proxy.async.shared::cta; setp.ne.u32 %p1, %r1, 0; setp.ge.u32 %p2, %r1, 32; setp.ne.u32 %p4, %r20, 0;
        @!%p1 mbarrier.init.shared::cta.b64 [%r3+6144], 1; @!%p1 mbarrier.init.shared::cta.b64 [%r3+6152], 1; {meet}
        mov.u32 %r21, 64; @%p4 mov.u32 %r21, {columns}; @%p2 bra TAKEN;
        tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r3+6160], %r21;
        tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;
        TAKEN: tcgen05.fence::before_thread_sync; {MEET} tcgen05.fence::after_thread_sync;
        ld.shared.u32 %r5, [%r3+6160]; add.u32 %r6, %r5, 32; add.u32 %r7, %r5, 36; @%p1 bra GIVEN; @%p4 bra GIVEN;
        cvt.u64.u32 %d7, %r3; shr.u64 %d7, %d7, 4; or.b64 %d8, %d7, {PLAIN}; add.s64 %d9, %d8, 256;
        or.b64 %d10, %d7, {SCALES}; add.s64 %d10, %d10, 288; add.s64 %d11, %d10, 32;
        tcgen05.cp.cta_group::2.32x128b.warpx4 [%r6], %d10; tcgen05.cp.cta_group::2.32x128b.warpx4 [%r7], %d11;
        {{ .reg .pred p; setp.ne.b32 p, 0, 0;
        tcgen05.mma.cta_group::{group}.kind::mxf8f6f4.block_scale.scale_vec::1X [%r5], %d8, %d9, {instruction}, [%r6], [%r7], p; }}
        add.u32 %r8, %r3, 6144; {commit} {then}
        GIVEN: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r3+6144], 0; @!%p3 bra GIVEN; tcgen05.fence::after_thread_sync;
        shr.u32 %r9, %r1, 5; shl.b32 %r9, %r9, 21; add.u32 %r9, %r9, %r5;
        tcgen05.ld.sync.aligned.32x32b.x{COLUMNS}.b32 {{{registers}}}, [%r9]; tcgen05.wait::ld.sync.aligned;
        shl.b32 %r11, %r20, 7; add.u32 %r11, %r11, %r1; shl.b32 %r11, %r11, 7; cvt.u64.u32 %d5, %r11; add.s64 %d6, %d2, %d5; {stores}
        tcgen05.fence::before_thread_sync; bar.sync 0; {meet_again} tcgen05.fence::after_thread_sync;
        @%p2 bra END; tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r5, 64;
        END:"
    );
    let mut buffers = [[image(0), image(1)].concat(), zeros(256 * COLUMNS * 4)];
    run(&module(0, 2, CLUSTER, &body), 2, 128, vec![], &mut buffers, seed)?;
    let got: Vec<f32> = words(&buffers[1]).into_iter().map(f32::from_bits).collect();
    for (i, got) in got.iter().enumerate() {
        let (row, column) = (i / COLUMNS, i % COLUMNS);
        let sum: f32 = (0..32).map(|k| small(row * 32 + k).1 * small(10_000 + column * 32 + k).1).sum();
        let want = sum * (1 << (exponent(row, 0) + exponent(column, 1))) as f32;
        if *got != want {
            return Err(format!("[{row}, {column}] is {got}, not {want}"));
        }
    }
    Ok(())
}

#[test]
fn a_product_has_its_rows_in_both_blocks() {
    for seed in 0..6 {
        product(PROGRAM, seed).unwrap();
    }
    let low = Program { instruction: INSTRUCTION ^ (3 << 27), ..PROGRAM };
    assert!(product(low, 0).unwrap_err().contains("a product of 128 by 32 in 2 blocks"));
    let other_scales = Program { instruction: INSTRUCTION ^ 3 << 29, ..PROGRAM };
    product(other_scales, 0).unwrap_err();
    let alone = Program { group: 1, ..PROGRAM };
    assert!(product(alone, 0).unwrap_err().contains("cta_group::2, and all of a kernel have the same"));
}

#[test]
fn both_blocks_take_and_give_back_together() {
    let fails = |program| product(program, 0).unwrap_err();
    assert!(fails(Program { meet: "", ..PROGRAM }).contains("nothing has said that the peer runs"));
    assert!(fails(Program { columns: 32, ..PROGRAM }).contains("its peer for"));
    // One block deallocates while the other still reads.
    let alone = Program { meet_again: "", ..PROGRAM };
    let found =
        (0..8).filter_map(|seed| product(alone, seed).err()).any(|error| error.contains("of the pair gives back"));
    assert!(found, "a block that gives its memory back early is not noticed");
}

#[test]
fn commits_arrive_where_they_are_told() {
    let one = "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.b64 [%r8];";
    let deadlock = product(Program { commit: one, ..PROGRAM }, 0).unwrap_err();
    assert!(deadlock.contains("deadlock") && deadlock.contains("block 1 warp 3"), "{deadlock}");
    let nobody = Program {
        commit: "mov.u16 %h1, 4; tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r8], %h1;",
        ..PROGRAM
    };
    assert!(product(nobody, 0).unwrap_err().contains("multicast to 0b100"));
    // A signal without a waiter may arrive after its block has exited.
    let late = Program {
        then: "add.u32 %r8, %r3, 6152; tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r8], %h1;",
        ..PROGRAM
    };
    let found = (0..8).filter_map(|seed| product(late, seed).err()).any(|error| error.contains("exit"));
    assert!(found, "a signal that comes too late is not noticed");
}

/// Both blocks load a box. The mbarrier whose address `report` writes to `%r4` counts it, and block
/// 0 waits for `bytes`.
fn load(qualifier: &str, report: &str, bytes: u32, seed: u64) -> Result<Vec<u32>, String> {
    let body = format!(
        ".shared .align 128 .b8 s[1024]; .shared .align 8 .b8 bar[8]; mov.u32 %r1, %tid.x; mov.u32 %r20, %cluster_ctarank;
        ld.param.u64 %d1, [f_param_2]; mov.b64 %d2, f_param_0; setp.ne.u32 %p1, %r1, 0; setp.ne.u32 %p2, %r20, 0; mov.u32 %r2, s;
        mov.u32 %r3, bar; @%p1 bra MADE; mbarrier.init.shared.b64 [%r3], 1; @%p2 bra MADE;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], {bytes}; MADE: fence.mbarrier_init.release.cluster; {MEET}
        {report} shl.b32 %r5, %r20, 3; @%p1 bra LOADED; mov.u16 %h1, 3;
        cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{qualifier};
        LOADED: @%p2 bra MEET; WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r3], 0; @!%p3 bra WAIT;
        MEET: {MEET} shl.b32 %r6, %r1, 5; add.u32 %r6, %r6, %r2; ld.shared.u32 %r7, [%r6];
        shl.b32 %r8, %r20, 5; add.u32 %r8, %r8, %r1; mul.wide.u32 %d5, %r8, 4; add.s64 %d6, %d1, %d5; st.global.u32 [%d6], %r7;"
    );
    let source: Vec<u32> = (0..1024).map(|i| i + 1).collect();
    let mut buffers = [bytes_of(&source, u32::to_le_bytes), zeros(256)];
    run(&module(1, 2, CLUSTER, &body), 2, 32, vec![map()], &mut buffers, seed)?;
    Ok(words(&buffers[1])[..64].to_vec())
}

fn map() -> TensorMap {
    super::copies::map(0)
}

#[test]
fn loads_report_to_the_mbarrier_of_the_pair() {
    let first = "mapa.shared::cluster.u32 %r4, %r3, 0;";
    let box_of = |qualifier: &str, rest: &str| format!("{qualifier} [%r2], [%d2, {{0, %r5}}], [%r4]{rest}");
    let pair = box_of(".cta_group::2", "");
    for seed in 0..6 {
        let got = load(&pair, first, 2048, seed).unwrap();
        // Rows 0 and 8 of 24 words, 32 words apart.
        assert_eq!((got[0], got[32]), (1, 257));
    }
    assert_ne!(load(&pair, first, 1024, 0).map(|got| got[32]), Ok(257), "block 0 waits for too little");
    let alone = load(&box_of("", ""), first, 2048, 0).unwrap_err();
    assert!(alone.contains("reports to an mbarrier of another"), "{alone}");
    // Each block's box is written to both blocks, and each copy counts at block 0.
    let both = box_of(".multicast::cluster.cta_group::2", ", %h1");
    load(&both, first, 4096, 0).unwrap();
}
