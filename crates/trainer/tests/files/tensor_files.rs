//! Tensors in files: reading them back, and the state of a file or folder after an error.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::path::Path;

use crate::table::table;
use anyhow::{Error, anyhow};
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use trainer::checkpoint::{CheckpointFolder, CheckpointKind, saved_steps};
use trainer::tensor_files::{NewTensor, bf16_bytes, f32_bytes, write_file, write_shards};
use trainer::{TensorFiles, create_folder};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Error type of a caller.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("the device is gone")]
    Device,
    #[error(transparent)]
    Folder(#[from] anyhow::Error),
}

fn tensor(name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> NewTensor<'static> {
    NewTensor { name: name.into(), dtype, shape: shape.into(), bytes: Box::new(move || Ok(bytes.clone())) }
}

/// A tensor of bytes.
fn bytes(name: &str, len: usize) -> NewTensor<'static> {
    tensor(name, Dtype::U8, &[len], vec![7; len])
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn what_is_written_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state.safetensors");
    let tensors = [
        tensor("moment", Dtype::BF16, &[2, 1], bf16_bytes(&[1.0, -2.0])),
        tensor("codes", Dtype::U8, &[3], vec![1, 2, 255]),
        tensor("half", Dtype::F16, &[2], [0x0001_u16, 0x7bff].map(u16::to_le_bytes).concat()),
        tensor("scalar", Dtype::F32, &[], f32_bytes(&[1.5])),
        tensor("nothing", Dtype::F32, &[0, 4], vec![]),
    ];
    write_file(&path, &tensors, Some(HashMap::from([("step".into(), "7".into())]))).unwrap();
    let (_, header) = SafeTensors::read_metadata(&fs::read(&path).unwrap()).unwrap();
    assert_eq!(header.metadata().as_ref().unwrap()["step"], "7");

    let files = TensorFiles::open_file(&path).unwrap();
    assert_eq!(files.names().collect::<Vec<_>>(), ["codes", "half", "moment", "nothing", "scalar"]);
    for NewTensor { name, dtype, shape, bytes } in &tensors {
        let read = files.get(name).unwrap();
        assert_eq!((read.dtype(), read.shape()), (*dtype, &shape[..]));
        assert_eq!(&*read.bytes().unwrap(), bytes().unwrap(), "{name}");
    }
    for (name, values) in
        [("moment", &[1.0, -2.0][..]), ("half", &[(-24.0_f32).exp2(), 65504.0]), ("scalar", &[1.5]), ("nothing", &[])]
    {
        assert_eq!(files.get(name).unwrap().to_f32().unwrap(), values, "{name}");
    }
    assert!(files.expect("nothing", &[0, 4]).is_ok() && files.get("absent").is_none());
    let file = path.display();
    for (error, text) in [
        (files.get("codes").unwrap().to_f32().map(drop), format!("{file}: codes has dtype U8; F32, F16, BF16 and")),
        (files.expect("codes", &[4]).map(drop), format!("{file}: codes has shape [3], the model needs [4]")),
        (files.expect("absent", &[4]).map(drop), format!("{file} lacks the tensor absent [4]")),
    ] {
        let error = error.unwrap_err().to_string();
        assert!(error.starts_with(&text), "{error}");
    }
}

#[test]
fn bf16_is_rounded_to_nearest_ties_to_even() {
    for (value, rounded) in [
        (0x3f80_8000, 0x3f80_u16),
        (0x3f80_8001, 0x3f81),
        (0x3f81_8000, 0x3f82),
        (0x3f81_7fff, 0x3f81),
        (0xbf80_8000, 0xbf80),
        (0x0000_8001, 0x0001),
        (0x8000_0000, 0x8000),
        (0x7f7f_ffff, 0x7f80),
        (0xff80_0000, 0xff80),
    ] {
        assert_eq!(bf16_bytes(&[f32::from_bits(value)]), rounded.to_le_bytes(), "{value:#x}");
    }
}

/// A tensor larger than a decoded chunk, from the first row and from others; then the file is cut.
#[test]
fn rows_of_a_large_tensor_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("large.safetensors");
    let values: Vec<f32> = (0..700_000).map(|i| i as f32).collect();
    write_file(&path, &[tensor("x", Dtype::F32, &[7, 100_000], f32_bytes(&values))], None).unwrap();
    let files = TensorFiles::open_file(&path).unwrap();
    let read = files.get("x").unwrap();
    assert!(read.to_f32().unwrap() == values);
    assert!(read.rows_f32(2..6).unwrap() == values[200_000..600_000]);
    assert!(read.rows_f32(7..7).unwrap().is_empty());
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(100).unwrap();
    let error = read.bytes().unwrap_err().to_string();
    assert!(error.starts_with(&format!("{}: 100 bytes, ", path.display())), "{error}");
}

/// Files and indexes may be cut, mixed up or untrusted. A row has shards with a tensor each, a file
/// with its content as characters for bytes, and the file and text of the error.
#[test]
fn folders_that_are_broken_are_errors() {
    type Row = (Vec<(String, String)>, String, String, String, String);
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("model");
    write_file(&dir.path().join("outside.safetensors"), &[bytes("x", 1)], None).unwrap();
    for (shards, file, content, at, says) in table::<Row>("refusals/tensor_folders") {
        fs::create_dir(&folder).unwrap();
        for (shard, name) in shards {
            write_file(&folder.join(shard), &[bytes(&name, 1)], None).unwrap();
        }
        let content: Vec<u8> = content.chars().map(|byte| u8::try_from(byte).unwrap()).collect();
        fs::write(folder.join(file), content).unwrap();
        let error = format!("{:#}", TensorFiles::open_folder(&folder).unwrap_err());
        let at = if at.is_empty() { folder.clone() } else { folder.join(at) };
        assert!(error.contains(&at.display().to_string()) && error.contains(&says), "{says}: {error}");
        fs::remove_dir_all(&folder).unwrap();
    }
    #[cfg(unix)]
    {
        let made = std::process::Command::new("mkfifo").arg(dir.path().join(SINGLE)).status();
        assert!(made.unwrap().success());
        let error = format!("{:#}", TensorFiles::open_folder(dir.path()).unwrap_err());
        assert!(error.contains(SINGLE) && error.contains("it is a pipe"), "{error}");
    }
}

/// Shards are named, filled and indexed as in transformers.
#[test]
fn shards_are_filled_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let sizes = [("embedding", 50), ("a", 10), ("b", 20), ("c", 15), ("d", 1), ("head", 41)];
    let tensors = sizes.map(|(name, size)| bytes(name, size));
    write_shards(dir.path(), &tensors, 40).unwrap();
    let index: Value = serde_json::from_slice(&fs::read(dir.path().join(INDEX)).unwrap()).unwrap();
    let file = |i: usize| format!("model-0000{i}-of-00004.safetensors");
    // `c` would not fit beside `a` and `b`; the embedding and the head are larger than a shard.
    let expected: BTreeMap<_, _> =
        [("embedding", 1), ("a", 2), ("b", 2), ("c", 3), ("d", 3), ("head", 4)].map(|(name, i)| (name, file(i))).into();
    assert_eq!(index, json!({"metadata": {"total_size": 137}, "weight_map": expected}));
    // Required by older versions of transformers.
    let first = fs::read(dir.path().join(file(1))).unwrap();
    let (_, header) = SafeTensors::read_metadata(&first).unwrap();
    assert_eq!(header.metadata().as_ref().unwrap()["format"], "pt");
    let files = TensorFiles::open_folder(dir.path()).unwrap();
    assert_eq!(files.num_bytes(), 137);
    for (name, size) in sizes {
        assert_eq!(files.get(name).unwrap().bytes().unwrap().len(), size, "{name}");
    }
}

#[test]
fn a_file_that_fails_replaces_none_and_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let good = || tensor("good", Dtype::F32, &[2], vec![0; 8]);
    let gone = NewTensor { bytes: Box::new(|| Err(anyhow!("the device is gone"))), ..good() };
    // Written after the tensor that fails.
    let never = NewTensor { bytes: Box::new(|| panic!("asked for")), ..tensor("never", Dtype::F32, &[2], vec![]) };
    let of = |name, shape: &[usize], len| tensor(name, Dtype::F32, shape, vec![0; len]);
    for (tensors, says) in [
        (vec![never, of("first", &[2], 8), gone], "the device is gone"),
        (vec![good(), of("short", &[2], 7)], "short has 7 bytes, its shape says 8"),
        (vec![good(), good()], "two tensors are called good"),
        (vec![of("huge", &[usize::MAX, 2], 0)], "huge [18446744073709551615, 2]"),
    ] {
        fs::write(&path, "what was there before").unwrap();
        let error = write_file(&path, &tensors, None).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
        assert_eq!(names(dir.path()), ["x.safetensors"], "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"what was there before");
    }

    let folder = dir.path().join("shards");
    fs::create_dir(&folder).unwrap();
    let twice = write_shards(&folder, &[good(), good()], 8).unwrap_err().to_string();
    assert!(twice.ends_with("two tensors are called good"), "{twice}");
    let cannot = |error: Error, path: &Path, says: &str| {
        assert_eq!(error.to_string(), format!("cannot write {}", path.display()));
        assert!(error.downcast_ref::<io::Error>().unwrap().to_string().contains(says), "{error:#}");
    };
    let absent = dir.path().join("absent");
    cannot(write_shards(&absent, &[good()], 8).unwrap_err(), &absent.join(SINGLE), "No such file");
    #[cfg(unix)]
    {
        // A link is not written through.
        let [outside, link] = ["outside", "link"].map(|name| dir.path().join(name));
        fs::write(&outside, "theirs").unwrap();
        std::os::unix::fs::symlink(&outside, &link).unwrap();
        cannot(write_file(&link, &[good()], None).unwrap_err(), &link, "it is a link");
        assert_eq!(fs::read(&outside).unwrap(), b"theirs");
    }
}

fn is_occupied(result: Result<(), Failure>) -> bool {
    result.unwrap_err().to_string().contains(" exists and is not an empty folder")
}

#[test]
fn a_folder_is_there_whole_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("new");
    let failed = create_folder(&path, |hidden| {
        fs::write(hidden.join("half"), "").unwrap();
        let [hidden] = &names(dir.path())[..] else { panic!("one hidden folder") };
        assert!(hidden.starts_with(".new.") && hidden.ends_with(".partial"), "{hidden}");
        // A folder left by a killed process, next to one whose process is alive.
        fs::create_dir(dir.path().join(".new.left.partial")).unwrap();
        fs::write(dir.path().join(".new.left.partial/LOCK"), "").unwrap();
        create_folder(&path, |_| {
            assert_eq!(names(dir.path()).iter().filter(|name| name.ends_with(".partial")).count(), 2);
            Err::<(), _>(Failure::Device)
        })
    });
    assert!(matches!(failed, Err(Failure::Device)));
    assert_eq!(names(dir.path()), [""; 0]);

    // Another process creates it in the meantime.
    let raced = create_folder(&path, |_| {
        fs::create_dir(&path).unwrap();
        fs::write(path.join("theirs"), "").unwrap();
        Ok::<_, Failure>(())
    });
    assert!(is_occupied(raced));
    assert_eq!((names(dir.path()), names(&path)), (vec!["new".to_string()], vec!["theirs".to_string()]));

    let fill = |hidden: &Path| Ok::<_, Failure>(fs::write(hidden.join("file"), "").map_err(Error::from)?);
    assert!(is_occupied(create_folder(&path, fill)));
    assert!(is_occupied(create_folder(Path::new("/"), fill)));
    fs::remove_file(path.join("theirs")).unwrap();
    create_folder(&path, fill).unwrap();
    create_folder(&dir.path().join("above/new"), fill).unwrap();
    assert_eq!((names(&path), names(&dir.path().join("above"))), (vec!["file".into()], vec!["new".to_string()]));

    #[cfg(unix)]
    {
        use std::os::unix::fs::{MetadataExt, symlink};
        fs::create_dir(dir.path().join("plain")).unwrap();
        let mode = |name: &str| fs::metadata(dir.path().join(name)).unwrap().mode();
        assert_eq!(mode("new"), mode("plain"), "as other folders");

        // Works through a link to an empty folder, but not through a dangling one.
        symlink(dir.path().join("plain"), dir.path().join("link")).unwrap();
        create_folder(&dir.path().join("link"), fill).unwrap();
        assert_eq!(names(&dir.path().join("plain")), ["file"]);
        symlink(dir.path().join("absent"), dir.path().join("dangling")).unwrap();
        assert!(is_occupied(create_folder(&dir.path().join("dangling"), fill)));
    }
}

/// Linux refuses to sync a device, which shows that files are synced before they get their names.
#[cfg(target_os = "linux")]
#[test]
fn what_cannot_be_synced_is_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("new");
    let fill = |hidden: &Path| Ok::<_, Error>(std::os::unix::fs::symlink("/dev/null", hidden.join("device"))?);
    let failed = create_folder(&path, fill);
    assert!(failed.unwrap_err().to_string().starts_with("cannot make the folder "));
    assert_eq!(names(dir.path()), [""; 0]);

    let folder = CheckpointFolder::open(&path).unwrap();
    let kind = CheckpointKind::ValidationLoss(None);
    folder.save(1, kind, 1, fill).unwrap_err();
    assert!(saved_steps(&path).unwrap().is_empty());
    folder.save(1, kind, 1, |_| Ok(())).unwrap();
    assert_eq!(saved_steps(&path).unwrap(), [1]);
}
