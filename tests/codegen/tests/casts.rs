//! Casts on the interpreted machines with and without `cvt.rn.satfinite`, against the scalar reference, bit for bit: every
//! 16-bit float, f32 of every kind, and every granularity on aligned and ragged tiles.

use codegen::device::{Execution, GenerateCuda, OfflineDevice, Running, execute, on_each};
use codegen::random::Random;
use cubecl_core::Runtime;
use cubecl_core::ir::{ElemType, FloatKind, StorageType};
use cubecl_core::server::Handle;
use cubecl_runtime::client::ComputeClient;
use float8_kernels::mx::to_blocked;
use float8_kernels::{
    Cast, Format, Granularity, MatrixView, Operand, Orientation, ScaleCalculationMode, ScaleMode, cuda_arch, quantize,
    quantize_with_amax, reference, row_words,
};
use half::{bf16, f16};

type Client = ComputeClient<GenerateCuda>;

const FORMATS: [Format; 2] = [Format::E4m3, Format::E5m2];
const ORIENTATIONS: [Orientation; 3] = [Orientation::Rows, Orientation::Cols, Orientation::Both];

/// With the integer encoder and with `cvt`.
const MACHINES: [u16; 2] = [80, 90];

fn start() -> Option<Running> {
    execute(Execution { seed: 0 })
}

fn read(client: &Client, handle: &Handle) -> Vec<u8> {
    client.read_one(handle.clone()).unwrap_or_else(|error| panic!("{error}")).to_vec()
}

fn view(client: &Client, bytes: &[u8], shape: [usize; 2], kind: FloatKind) -> MatrixView {
    let dtype = StorageType::Scalar(ElemType::Float(kind));
    MatrixView { handle: client.create_from_slice(bytes), shape, strides: [shape[1], 1], dtype }
}

/// Bytes of 16-bit or 32-bit patterns, and their values.
fn values(bits: &[u32], kind: FloatKind) -> (Vec<u8>, Vec<f32>) {
    let of = |bits: u32| match kind {
        FloatKind::F16 => (bits.to_le_bytes()[..2].to_vec(), f16::from_bits(bits as u16).to_f32()),
        FloatKind::BF16 => (bits.to_le_bytes()[..2].to_vec(), bf16::from_bits(bits as u16).to_f32()),
        _ => (bits.to_le_bytes().to_vec(), f32::from_bits(bits)),
    };
    let (bytes, values): (Vec<_>, Vec<_>) = bits.iter().map(|&bits| of(bits)).unzip();
    (bytes.concat(), values)
}

fn bits(seed: u64, len: usize) -> Vec<u32> {
    let mut random = Random(seed);
    (0..len).map(|_| random.bits()).collect()
}

/// Codes of a copy, those of element `(r, c)` of `x` being `want[r * cols + c]`, and zero padding.
fn check(client: &Client, copy: &Operand, want: &[u8], [rows, cols]: [usize; 2], transposed: bool, what: &str) {
    let codes = read(client, &copy.codes);
    let pitch = row_words(copy.k) * 4;
    assert_eq!([copy.rows, copy.k], if transposed { [cols, rows] } else { [rows, cols] });
    for (i, code) in codes.iter().enumerate().take(copy.rows * pitch) {
        let (r, c) = (i / pitch, i % pitch);
        let place = if transposed { c * cols + r } else { r * cols + c };
        let want = if c < copy.k { want[place] } else { 0 };
        assert_eq!(*code, want, "{what}, transposed {transposed}, [{r}, {c}]");
    }
}

/// The copies of `view`, whose values are `x`, and their scales.
fn check_cast(client: &Client, view: &MatrixView, x: &[f32], cast: Cast, orientation: Orientation) {
    let [rows, cols] = view.shape;
    let made = quantize(client, view, cast, orientation).expect("a valid view");
    for (copy, transposed) in [(&made.rows, false), (&made.cols, true)] {
        let Some(copy) = copy else { continue };
        let want = reference::quantize(x, rows, cols, cast, transposed);
        let what = format!("{cast:?} of {:?} {:?} {orientation:?}", view.shape, view.dtype);
        let inverses = want.scales.iter().map(|scale| scale.inverse());
        let scales: Vec<u8> = if cast.granularity == Granularity::Block1x32 {
            let bytes: Vec<u8> = inverses.map(|scale| scale.to_e8m0().expect("a power of two")).collect();
            to_blocked(&bytes, copy.rows, copy.k.div_ceil(32))
        } else {
            inverses.flat_map(|scale| scale.get().to_le_bytes()).collect()
        };
        assert_eq!(read(client, &copy.inv_scale), scales, "{what}");
        check(client, copy, &want.codes, view.shape, transposed, &what);
    }
}

/// Runs `check` on both machines.
fn on_both(check: impl Fn(&Client) + Sync) {
    on_each(MACHINES, |sm| check(&GenerateCuda::client(&OfflineDevice::new(sm))));
}

/// All of `x` by one scale from `amax`, in every orientation.
fn check_given(x: &[u32], kind: FloatKind, shape: [usize; 2], format: Format, amax: f32) {
    on_both(|client| {
        let (bytes, x) = values(x, kind);
        let cast = Cast { format, granularity: Granularity::Tensor, scale_mode: ScaleMode::F32 };
        let mut want = vec![0; x.len()];
        reference::cast(&x, reference::amax_to_scale(amax, format, cast.scale_mode), format, &mut want);
        let x = view(client, &bytes, shape, kind);
        let amax = client.create_from_slice(&amax.to_le_bytes());
        for orientation in ORIENTATIONS {
            let made = quantize_with_amax(client, &x, &amax, false, cast, orientation).expect("a valid view");
            let what = format!("{kind:?} to {format} on {:?}", cuda_arch(client));
            for (copy, transposed) in [(&made.rows, false), (&made.cols, true)] {
                if let Some(copy) = copy {
                    check(client, copy, &want, shape, transposed, &what);
                }
            }
        }
    });
}

#[test]
fn every_16_bit_float() {
    let Some(_running) = start() else { return };
    let every: Vec<u32> = (0..1 << 16).collect();
    for kind in [FloatKind::BF16, FloatKind::F16] {
        for (format, amax) in [(FORMATS[0], 448.0), (FORMATS[1], 57344.0), (FORMATS[0], 3.7e-3), (FORMATS[1], 1e30)] {
            check_given(&every, kind, [256, 256], format, amax);
        }
    }
}

#[test]
fn f32_of_every_kind() {
    let Some(_running) = start() else { return };
    for format in FORMATS {
        // Every code and the midpoints between codes, a step of f32 to either side, of both signs; then any bits at all.
        let codes = (0..=127u8).map(|code| reference::decode(code, format)).filter(|value| value.is_finite());
        let codes: Vec<f32> = codes.collect();
        let midpoints = codes.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
        let exact = codes.iter().copied().chain(midpoints).map(f32::to_bits);
        let near = exact.flat_map(|bits| [bits.saturating_sub(1), bits, bits + 1]);
        let special = [0x7f80_0000, 0x7f80_0001, 0x7fc0_0000, 0x7fff_ffff, 0x7f7f_ffff, 1, 0x0080_0000];
        let mut x: Vec<u32> = near.chain(special).flat_map(|bits| [bits, bits | 0x8000_0000]).collect();
        x.extend(bits(5, 128 * 128 - x.len()));
        for amax in [format.max(), 0.37, f32::NAN] {
            check_given(&x, FloatKind::F32, [128, 128], format, amax);
        }
    }
}

#[test]
fn every_granularity_in_tiles() {
    let Some(_running) = start() else { return };
    let casts = [
        (Granularity::Tensor, ScaleMode::F32),
        (Granularity::Row, ScaleMode::PowerOfTwo),
        (Granularity::Row, ScaleMode::F32),
        (Granularity::Block1x128, ScaleMode::F32),
        (Granularity::Block128x128, ScaleMode::PowerOfTwo),
    ];
    // Whole tiles, aligned rows that end inside one, and rows that are not aligned.
    for (i, shape) in [[256, 128], [133, 200], [40, 1040], [129, 131]].into_iter().enumerate() {
        for kind in [FloatKind::F32, FloatKind::F16, FloatKind::BF16] {
            // Half of any bits are huge; a scale of each block is not.
            let mut patterns = bits(i as u64, shape[0] * shape[1]);
            patterns.iter_mut().for_each(|bits| *bits &= if kind == FloatKind::F32 { 0xbfff_ffff } else { 0xbfff });
            let (bytes, x) = values(&patterns, kind);
            let mx = (Granularity::Block1x32, ScaleMode::E8m0(ScaleCalculationMode::ALL[i]));
            for (j, (granularity, scale_mode)) in casts.into_iter().chain([mx]).enumerate() {
                let cast = Cast { format: FORMATS[(i + j) % 2], granularity, scale_mode };
                let client = GenerateCuda::client(&OfflineDevice::new(MACHINES[(i + j + 1) % 2]));
                let view = view(&client, &bytes, shape, kind);
                for orientation in ORIENTATIONS {
                    check_cast(&client, &view, &x, cast, orientation);
                }
            }
        }
    }
}

/// Blocks of 32 of any exponent, whose largest value is at, or next to, what decides between two scales; of zeros, of subnormals,
/// and with infinities and NaNs in them. As bits of f32.
fn blocks() -> Vec<u32> {
    // Neighbours of the formats' largest values, 1.75 times a power of two, and of what rounds up to the next.
    let mantissas =
        [0, 1, 0x5f_ffff, 0x60_0000, 0x60_0001, 0x6f_ffff, 0x70_0000, 0x70_0001, 0x77_ffff, 0x78_0000, 0x7f_ffff];
    let exponents = [0, 1, 2, 7, 8, 9, 15, 16, 110, 119, 126, 127, 128, 142, 200, 246, 253, 254];
    let largest = exponents.iter().flat_map(|e| mantissas.map(|m| e << 23 | m));
    let largest: Vec<u32> = largest.chain([0x7f80_0000, 0x7f80_0001, 0x7fff_ffff, 0, 0]).collect();
    let mut x = bits(23, 32 * largest.len().next_multiple_of(8));
    for (block, largest) in x.chunks_mut(32).zip(largest) {
        // Smaller by any power of two: none of the block decides but the one.
        block.iter_mut().for_each(|x| *x = (*x % (largest & 0x7f80_0000).max(1)) | *x & 0x8000_0000);
        block[7] = largest | block[7] & 0x8000_0000;
    }
    x
}

#[test]
fn every_mx_scale() {
    let Some(_running) = start() else { return };
    let blocks = blocks();
    let (rows, cols) = (blocks.len() / 256, 256);
    for (kind, orientation) in
        [(FloatKind::F32, Orientation::Rows), (FloatKind::BF16, Orientation::Rows), (FloatKind::F32, Orientation::Cols)]
    {
        let bits = |bits: u32| if kind == FloatKind::F32 { bits } else { bits >> 16 };
        // Blocks of columns are blocks of rows of the transpose.
        let (shape, place): (_, fn(usize, usize) -> usize) = match orientation {
            Orientation::Cols => ([cols, rows], |i, rows| i % rows * 256 + i / rows),
            _ => ([rows, cols], |i, _| i),
        };
        let x: Vec<u32> = (0..blocks.len()).map(|i| bits(blocks[place(i, rows)])).collect();
        let (bytes, x) = values(&x, kind);
        on_both(|client| {
            let view = view(client, &bytes, shape, kind);
            for (format, mode) in FORMATS.into_iter().flat_map(|f| ScaleCalculationMode::ALL.map(|mode| (f, mode))) {
                let cast = Cast { format, granularity: Granularity::Block1x32, scale_mode: ScaleMode::E8m0(mode) };
                check_cast(client, &view, &x, cast, orientation);
            }
        });
    }
}
