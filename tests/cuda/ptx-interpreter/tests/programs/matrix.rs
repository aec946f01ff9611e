//! Matrix instructions of warps and warpgroups: loads, operand layouts in shared memory, and the
//! time of results.

use super::{module, run, small, words, zeros};

/// Byte of element (row, k) in an operand's memory.
type Place = fn(usize, usize) -> usize;

/// Descriptor of an operand without its address, and the places of its elements.
#[derive(Clone, Copy)]
struct Layout(u64, Place);

/// Core matrices of 8 rows of 16 bytes: 128 bytes apart along K, 256 along rows.
const PLAIN: Layout =
    Layout((128 >> 4) << 16 | (256 >> 4) << 32, |row, byte| row / 8 * 256 + byte / 16 * 128 + row % 8 * 16 + byte % 16);

/// Rows of 32 bytes; rows 4 to 7 of each 8 have their two chunks exchanged.
const SWIZZLED: Layout =
    Layout(3 << 62 | 1 << 16 | (256 >> 4) << 32, |row, byte| row * 32 + (byte ^ if row % 8 >= 4 { 16 } else { 0 }));

/// Rows of 32 bytes, which threads load to registers.
const ROWS: Layout = Layout(0, |row, byte| row * 32 + byte);

/// Steps of K, each with 64 rows of two bytes that are swizzled by the step. Eight steps are 1024
/// bytes; the next 64 rows follow 16 steps.
const COLUMNS: Layout = Layout(1 << 62 | (2048 >> 4) << 16 | (1024 >> 4) << 32, |row, byte| {
    let (k, column) = (byte / 2, 2 * (row % 64));
    row / 64 * 2048 + k * 128 + (column ^ ((k % 8) << 4)) + byte % 2
});

/// `D [64][n] = A [64][32 bytes] · B [n][32 bytes]ᵀ + 1`.
#[derive(Clone, Copy)]
struct Product {
    n: usize,
    /// Shape and types, and the flags.
    form: [&'static str; 2],
    /// Bytes of an element: 1 for e4m3, 2 for bf16.
    size: usize,
    /// Of A and of B.
    layouts: [Layout; 2],
    wait: &'static str,
}

const ALL_DONE: &str = "wgmma.wait_group.sync.aligned 0;";

const FP8: Product =
    Product { n: 16, form: ["k32.f32.e4m3.e4m3", "1, 1"], size: 1, layouts: [PLAIN; 2], wait: ALL_DONE };

/// Runs a product and compares it with the sums of its definition.
fn wgmma(product: Product, seed: u64) -> Result<(), String> {
    let Product { n, form: [types, flags], size, layouts, wait } = product;
    let registers = 10..10 + n / 2;
    let all =
        |format: fn(usize) -> String, separator| registers.clone().map(format).collect::<Vec<_>>().join(separator);
    let (names, ones) = (all(|i| format!("%f{i}"), ", "), all(|i| format!("mov.f32 %f{i}, 0f3F800000;"), " "));
    let stores = all(|i| format!("st.global.f32 [%d6+{}], %f{i};", (i - 10) * 4), " ");
    let (a, load) = if layouts[0].0 == ROWS.0 {
        let load = "and.b32 %r5, %r1, 96; shl.b32 %r5, %r5, 4; and.b32 %r6, %r1, 28; shl.b32 %r6, %r6, 3; add.u32 %r5, %r5, %r6;
            and.b32 %r6, %r1, 3; shl.b32 %r6, %r6, 2; add.u32 %r5, %r5, %r6; add.u32 %r5, %r5, %r3; ld.shared.u32 %r20, [%r5];
            ld.shared.u32 %r21, [%r5+256]; ld.shared.u32 %r22, [%r5+16]; ld.shared.u32 %r23, [%r5+272];";
        ("{%r20, %r21, %r22, %r23}", load)
    } else {
        ("%d8", "")
    };
    let copies = (0..64).step_by(16).map(|i| format!(
        "ld.global.v4.u32 {{%r10, %r11, %r12, %r13}}, [%d4+{i}]; st.shared.v4.u32 [%r4+{i}], {{%r10, %r11, %r12, %r13}};"
    ));
    // Each thread copies 64 bytes of the shared memory image: 2048 bytes of A, then B.
    let body = format!(
        ".shared .align 1024 .b8 s[8192]; mov.u32 %r1, %tid.x; ld.param.u64 %d1, [f_param_0]; ld.param.u64 %d2, [f_param_1];
        shl.b32 %r2, %r1, 6; cvt.u64.u32 %d3, %r2; add.s64 %d4, %d1, %d3; mov.u32 %r3, s; add.u32 %r4, %r3, %r2; {}
        fence.proxy.async.shared::cta; bar.sync 0; {load} {ones} cvt.u64.u32 %d7, %r3; shr.u64 %d7, %d7, 4; or.b64 %d8, %d7, {};
        add.s64 %d7, %d7, 128; or.b64 %d9, %d7, {}; wgmma.fence.sync.aligned; {{ .reg .pred p; setp.ne.b32 p, 1, 0;
        wgmma.mma_async.sync.aligned.m64n{n}{types} {{{names}}}, {a}, %d9, p, {flags}; }} wgmma.commit_group.sync.aligned; {wait}
        mul.wide.u32 %d6, %r1, {}; add.s64 %d6, %d2, %d6; {stores}",
        copies.collect::<String>(), layouts[0].0, layouts[1].0, 2 * n
    );
    let k = 32 / size;
    let mut image = vec![0xff; 8192];
    for (rows, base, salt, Layout(_, place)) in [(64, 0, 0, layouts[0]), (n, 2048, 1000, layouts[1])] {
        for (row, k) in (0..rows).flat_map(|row| (0..k).map(move |k| (row, k))) {
            let (code, value) = small(salt + row * 32 + k);
            let bytes = if size == 1 { [code, 0] } else { ((value.to_bits() >> 16) as u16).to_le_bytes() };
            for (i, byte) in bytes.into_iter().take(size).enumerate() {
                image[base + place(row, size * k + i)] = byte;
            }
        }
    }
    let mut buffers = [image, zeros(128 * 2 * n)];
    run(&module(0, 2, "", &body), 1, 128, vec![], &mut buffers, seed)?;
    for (i, got) in words(&buffers[1]).into_iter().map(f32::from_bits).enumerate().take(64 * n) {
        let (thread, register) = (i / (n / 2), i % (n / 2));
        let row = thread / 32 * 16 + thread % 32 / 4 + register / 2 % 2 * 8;
        let column = register / 4 * 8 + thread % 4 * 2 + register % 2;
        let want: f32 = 1.0 + (0..k).map(|k| small(row * 32 + k).1 * small(1000 + column * 32 + k).1).sum::<f32>();
        if got != want {
            return Err(format!("[{row}, {column}] is {got}, not {want}"));
        }
    }
    Ok(())
}

#[test]
fn wgmma_reads_its_layouts_and_shows_results_when_waited_for() {
    for seed in 0..3 {
        wgmma(FP8, seed).unwrap();
        wgmma(Product { layouts: [SWIZZLED; 2], ..FP8 }, seed).unwrap();
    }
    let mixed = Layout(PLAIN.0, SWIZZLED.1);
    assert!(wgmma(Product { layouts: [mixed; 2], ..FP8 }, 0).is_err());
    let early = Product { wait: "wgmma.wait_group.sync.aligned 1;", ..FP8 };
    assert!(wgmma(early, 0).unwrap_err().contains("in flight"));
}

/// 16-bit operands whose rows are contiguous have the product of their transposed copies.
#[test]
fn wgmma_reads_columns() {
    let product =
        |layouts, flags| Product { n: 72, form: ["k16.f32.bf16.bf16", flags], size: 2, layouts, wait: ALL_DONE };
    let pairs = [
        ([SWIZZLED, SWIZZLED], "1, 1, 0, 0"),
        ([COLUMNS, SWIZZLED], "1, 1, 1, 0"),
        ([SWIZZLED, COLUMNS], "1, 1, 0, 1"),
        ([COLUMNS, COLUMNS], "1, 1, 1, 1"),
    ];
    for ((layouts, flags), seed) in pairs.into_iter().flat_map(|pair| [(pair, 0), (pair, 1)]) {
        wgmma(product(layouts, flags), seed).unwrap_or_else(|error| panic!("{flags}: {error}"));
    }
    // A wrong distance of 64 rows, of eight steps, and a flag left out.
    for wrong in [COLUMNS.0 ^ (1024 >> 4) << 16, COLUMNS.0 ^ (2048 >> 4) << 32] {
        assert!(wgmma(product([SWIZZLED, Layout(wrong, COLUMNS.1)], "1, 1, 0, 1"), 0).is_err());
    }
    assert!(wgmma(product([COLUMNS, COLUMNS], "1, 1, 1, 0"), 0).is_err());
    let error = wgmma(product([PLAIN, SWIZZLED], "1, 1, 1, 0"), 0).unwrap_err();
    assert!(error.contains("not modelled"), "{error}");
}

/// Rows of A in registers, which may be copied but not changed before the wait.
#[test]
fn wgmma_takes_registers_of_a() {
    let product = |b, flags, wait| {
        wgmma(Product { n: 72, form: ["k16.f32.bf16.bf16", flags], size: 2, layouts: [ROWS, b], wait }, 0)
    };
    product(SWIZZLED, "1, 1, 0", ALL_DONE).unwrap();
    product(COLUMNS, "1, 1, 1", "mov.b32 %r30, %r20; wgmma.wait_group.sync.aligned 0; mov.b32 %r20, 1;").unwrap();
    for change in ["mov.b32 %r23, 1;", "add.u32 %r20, %r20, 1;", "ld.shared.u32 %r21, [%r5];"] {
        let early = format!("{change} {ALL_DONE}").leak();
        let error = product(COLUMNS, "1, 1, 1", early).unwrap_err();
        assert!(error.contains("register of A"), "{change}: {error}");
    }
}

#[test]
fn mma_takes_what_ldmatrix_loads() {
    // A [16][32] and B [8][32] bytes, row-major; as 16-bit matrices of 8 by 8 they are four and
    // two.
    let body = ".shared .align 16 .b8 s[1024]; mov.u32 %r1, %tid.x; ld.param.u64 %d1, [f_param_0]; ld.param.u64 %d2, [f_param_1];
        mul.wide.u32 %d3, %r1, 32; add.s64 %d4, %d1, %d3; mov.u32 %r2, s; shl.b32 %r3, %r1, 5; add.u32 %r4, %r2, %r3;
        ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%d4]; st.shared.v4.u32 [%r4], {%r10, %r11, %r12, %r13};
        ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%d4+16]; st.shared.v4.u32 [%r4+16], {%r10, %r11, %r12, %r13}; bar.warp.sync -1;
        and.b32 %r5, %r1, 15; shl.b32 %r5, %r5, 5; and.b32 %r6, %r1, 16; add.u32 %r5, %r5, %r6; add.u32 %r5, %r5, %r2;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20, %r21, %r22, %r23}, [%r5];
        and.b32 %r5, %r1, 7; shl.b32 %r5, %r5, 5; and.b32 %r6, %r1, 8; shl.b32 %r6, %r6, 1; add.u32 %r5, %r5, %r6; add.u32 %r5, %r5, %r2;
        ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r24, %r25}, [%r5+512]; mov.f32 %f1, 0f00000000;
        mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%f2, %f3, %f4, %f5}, {%r20, %r21, %r22, %r23}, {%r24, %r25}, {%f1, %f1, %f1, %f1};
        shr.u32 %r7, %r1, 2; and.b32 %r8, %r1, 3; mul.lo.u32 %r9, %r7, 32; mad.lo.u32 %r9, %r8, 8, %r9; cvt.u64.u32 %d5, %r9; add.s64 %d6, %d2, %d5;
        st.global.v2.f32 [%d6], {%f2, %f3}; st.global.v2.f32 [%d6+256], {%f4, %f5};";
    let mut image = vec![0; 1024];
    (0..768).for_each(|i| image[i] = small(i).0);
    let mut buffers = [image, zeros(512)];
    run(&module(0, 2, "", body), 1, 32, vec![], &mut buffers, 0).unwrap();
    for (i, got) in words(&buffers[1])[..128].iter().enumerate() {
        let (row, column) = (i / 8, i % 8);
        let want: f32 = (0..32).map(|k| small(row * 32 + k).1 * small(512 + column * 32 + k).1).sum();
        assert_eq!(f32::from_bits(*got), want, "[{row}, {column}]");
    }
}

#[test]
fn accumulators_in_flight_are_not_to_be_read() {
    // A copy receives the pending value.
    let copy = "mov.f32 %f30, %f10; mov.f32 %f31, %f30; wgmma.wait_group.sync.aligned 0; mov.f32 %f10, %f31;";
    wgmma(Product { wait: copy, ..FP8 }, 0).unwrap();
    let add = "wgmma.wait_group.sync.aligned 1; add.f32 %f20, %f10, %f11;";
    let error = wgmma(Product { wait: add, ..FP8 }, 0).unwrap_err();
    assert!(error.contains("in flight"), "{error}");
}
